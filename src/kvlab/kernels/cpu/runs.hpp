// A loop divided among threads: each has a run of items that lie one behind the other, so that what it prefetches behind an
// item is its own next one. Then it helps with the runs of others.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace {

struct alignas(64) Run {
    std::atomic<int> next;
    int end;

    // The next item, unless it is `end` or beyond.
    int take() { return next.fetch_add(1, std::memory_order_relaxed); }
};

class Runs {
public:
    Runs(int items, int threads) : threads(threads), runs(new Run[threads]) {
        for (int thread = 0; thread < threads; ++thread) {
            runs[thread].next = int(int64_t(items) * thread / threads);
            runs[thread].end = int(int64_t(items) * (thread + 1) / threads);
        }
    }

    // `work` for items until none is left.
    template <class Work>
    void each(int thread, Work work) {
        for (int other = 0; other < threads; ++other) {
            Run& run = runs[(thread + other) % threads];
            for (int item; (item = run.take()) < run.end;) work(item);
        }
    }

private:
    const int threads;
    const std::unique_ptr<Run[]> runs;
};

}  // namespace
