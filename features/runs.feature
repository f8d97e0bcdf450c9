@tracked
Feature: Runs
  A run is composed on the command line, executed, and kept with all that is needed to compare it.

  Rule: A run is composed from choices, and a mistake is named in a sentence

    @R13.1
    Scenario Outline: Every part is chosen on the command line
      When I run "kv=<kv> scheduler=<scheduler> attention=<attention>" on a tiny model
      Then the command succeeds
      And the run used the choice "<kv>" for "kv", "<scheduler>" for "scheduler" and "<attention>" for "attention"
      And all 4 requests were completed

      Examples:
        | kv         | scheduler  | attention |
        | paged      | continuous | sdpa      |
        | contiguous | static     | concat    |

    @R13.1
    Scenario Outline: A choice that does not exist lists those that do
      When I run "<choice>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | choice                  | message                                                            |
        | kv=segmented            | kv=segmented: unknown; known: contiguous, paged, paged_unshared    |
        | scheduler=eager         | scheduler=eager: unknown; known: continuous, static                |
        | attention.backend=flash | attention.backend=flash: unknown; known: concat, cpu, ... sdpa     |

    @R13.1
    Scenario Outline: A wrong value names its key
      When I run "<override>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | override                   | message                                                                       |
        | kv.num_blocks=many         | kv.num_blocks=many: must be a whole number                                    |
        | kv.num_blokcs=8            | kv.num_blokcs=8: unknown; did you mean kv.num_blocks?                         |
        | scheduler.max_batch_size=0 | scheduler.max_batch_size=0: must be a number, at least 1                      |
        | kv.memory=12parsecs        | kv.memory=12parsecs: is not a size; write for example 512MiB                  |
        | kv.num_blocks=1            | pool of 1 blocks of 16 tokens ... too small ... kv.num_blocks=3, or ... fit   |
        | model.max_seq_len=20       | prompt of ... more than model.max_seq_len=20; model.max_seq_len= ... would    |
        | workload.output_len=99999  | more than model.max_seq_len= ... the model has positions up to ... take another model |
        | executor=cuda              | executor.device=cuda: PyTorch finds no CUDA device ... executor.device=cpu    |
        | executor.threads=4096      | executor.threads=4096: is more than ... cores ... executor.threads= ... null  |

  Rule: What a run measured is kept with what it was

    @R13.2
    Scenario: Capacity, throughput and the whole configuration are in the tracking store
      When I run "kv=paged scheduler=continuous attention=sdpa" on a tiny model
      Then the tracked run is "FINISHED"
      And it has the metrics
        | metric                           |
        | capacity/peak_running            |
        | capacity/kv_bytes                |
        | throughput/output_tokens_per_s   |
        | latency/ttft_ms_p99              |
        | kv/internal_fragmentation_mean   |
      And they equal those of summary.json
      And its parameters hold every setting of config.yaml
      And its artifacts are "config.yaml requests.parquet steps.parquet summary.json"

    @R13.2
    Scenario: A run says what it served, where and by which program
      When I run "kv=paged scheduler=continuous attention=sdpa" on a tiny model
      Then the tracked run's input is the workload "burst16" with the digest of summary.json
      And its profile has 4 requests and the lengths that requests.parquet has
      And its tags name "host.cpu host.os host.memory version.torch version.kvlab version.python command"
      And the message names uncommitted changes if and only if the tag "git.dirty" does

    @R13.2
    Scenario: The logs agree with the figures
      When I run "kv=paged scheduler=continuous attention=sdpa" on a tiny model
      Then requests.parquet holds a row for each of 4 requests with its tokens and times
      And the peak of "running" in steps.parquet is the metric "capacity/peak_running"
      And the sum of the tokens in requests.parquet is the metric "tokens/output"

    @R13.2
    Scenario: Where a step's time goes is kept on demand
      When I run "debug=profile" on a tiny model
      Then the tracked run is "FINISHED"
      And it has the metrics
        | metric                      |
        | profile/attention_ms_mean   |
        | profile/linear_share        |
        | profile/elementwise_share   |
        | profile/sampling_share      |
        | profile/scheduling_share    |
        | profile/other_share         |
      And its artifacts are "config.yaml requests.parquet steps.parquet summary.json trace.json"
      And the message says "attention ... linear ... elementwise ... sampling ... scheduling ... other"

    @R13.2
    Scenario: A run is looked at rather than read
      When I run "figures=true kv.num_blocks=6 scheduler.admission_reserve=0" on a tiny model
      Then the command succeeds
      And its artifacts are "blocks.parquet figures trace.json"
      And its folder "figures" holds "memory.png pool_map.png timeline.png latency.png hover.html"
      And its page has each request with its time to the first token, and the blocks that it holds

    @R13.2
    Scenario: A tracking server that does not answer costs no result
      Given a tracking server that accepts connections and never answers
      When I run "tracking.timeout_s=2" on a tiny model against that server
      Then the command fails without a traceback
      And the message says "warning: ... tracking.timeout_s ... results are kept in"
      And the results on disk are complete

  Rule: A sweep is one experiment

    @R13.3
    Scenario: A multirun over batch and blocks tracks a child for each point under one parent
      When I sweep "kv.num_blocks=2,8,16 scheduler.max_batch_size=1,4" on a tiny model
      Then the tracking store holds one parent with 6 children
      And each child has its own "kv.num_blocks" and "scheduler.max_batch_size" among its parameters
      And the points with 2 blocks, too few for a request, are recorded as "out_of_memory"
      And the other points are recorded as "finished"
      And the command succeeds

  Rule: Runs can be repeated

    @R13.4
    Scenario: The same seed gives the same requests and the same tokens
      When I run "seed=1" on a tiny model twice
      Then both runs had the same prompts and produced the same tokens

    @R13.4
    Scenario: Another seed gives other requests
      When a tiny model is run with "seed=1" and with "seed=2"
      Then the runs had different prompts

  Rule: A disk that is full, read-only or gone ends no run

    @R13.8
    Scenario Outline: A file that cannot be written is named, and costs no other
      When I run "tracking=off" on a tiny model while the disk has no space for "<file>"
      Then the command ends with status 1
      And the message says "<file>: cannot be written: No space left on device; free some space there"
      And the message says "output tokens ... tok/s"
      And the other results on disk are "<others>"

      Examples:
        | file          | others                                      |
        | summary.json  | config.yaml requests.parquet steps.parquet  |
        | steps.parquet | config.yaml requests.parquet summary.json   |

    @R13.8
    Scenario: A directory that cannot be written to is refused before the run
      When I run "tracking=off" on a tiny model while the disk has no space for "anything"
      Then the command ends with status 2
      And the message says "hydra.run.dir= ... cannot be written: No space left on device; free some space there"

  Rule: An interrupted run keeps what it measured

    @R13.5
    Scenario Outline: A run that is asked to stop is marked and keeps its figures
      When I start a run that would take minutes on a tiny model and send it "<signal>" once it produces tokens
      Then the command ends with status 130
      And the tracked run is "KILLED" with the tag "interrupted"
      And it has figures of the part that ran
      And the results on disk are complete

      Examples:
        | signal  |
        | SIGINT  |
        | SIGTERM |
