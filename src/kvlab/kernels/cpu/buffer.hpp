// Memory that is reused by every call: the first write to a new page costs more than the write itself. Large pages are
// used where the system has them, since small pages conflict with each other in the L2 cache.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

class Buffer {
public:
    char* at_least(size_t size) {
        if (size > room) {
            memory.reset();
            room = 0;
            const size_t wanted = (size + PAGE - 1) / PAGE * PAGE;
            memory.reset(static_cast<char*>(std::aligned_alloc(PAGE, wanted)));
            if (!memory) throw std::bad_alloc();
            room = wanted;
#if defined(__linux__)
            madvise(memory.get(), room, MADV_HUGEPAGE);
#endif
        }
        return memory.get();
    }

private:
    static constexpr size_t PAGE = size_t(2) << 20;
    struct Free {
        void operator()(char* memory) const { std::free(memory); }
    };
    std::unique_ptr<char, Free> memory;
    size_t room = 0;
};

}  // namespace
