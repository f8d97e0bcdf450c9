Feature: Sweeps
  Many runs are one experiment: it says what it will do, goes on where it was stopped, and reports what failed.

  Background:
    Given a laboratory with a store of its own

  Rule: Points that are done are not run again

    @R13.3 @R13.5 @slow @tracked
    Scenario: A sweep that was interrupted is resumed
      Given a sweep over "kv.num_blocks=8,9,10" that was interrupted behind its first point
      When I sweep in the laboratory "kv.num_blocks=8,9,10 resume=true"
      Then it ends with status 0
      And it says "3 points, 1 run done before: 2 jobs"
      And it says "3 runs: 3 finished; 1 of them done before"
      And the store holds one sweep with 3 finished runs, each of another configuration, and 1 marked as interrupted

    @R13.3
    Scenario: Nothing can be resumed where nothing is tracked
      When I sweep in the laboratory "kv.num_blocks=8,9 resume=true tracking=off"
      Then it ends with status 2
      And it says "resume=true: with tracking=off nothing is known of earlier runs"

  Rule: A measurement can be repeated

    @R13.3 @R13.4 @slow @tracked
    Scenario: Repeats take turns
      When I sweep in the laboratory "kv.num_blocks=8,9 repeats=2"
      Then it ends with status 0
      And it says "2 points, 2 times each: 4 jobs"
      And its jobs were
        | point           | repeat |
        | kv.num_blocks=8 | 0      |
        | kv.num_blocks=9 | 0      |
        | kv.num_blocks=8 | 1      |
        | kv.num_blocks=9 | 1      |
      And the repeats of a point are tagged, and had the same requests

  Rule: What failed is reported at the end, by the exit code too

    @R13.3 @slow
    Scenario Outline: The exit code
      When I sweep in the laboratory "<overrides>"
      Then it ends with status <code>
      And it says "<summary>"

      Examples:
        | overrides                                                             | code | summary                                           |
        | kv.num_blocks=1,8                                                     | 0    | 2 runs: 1 finished, 1 did not fit in memory       |
        | debug=faults debug.faults.kind=forward debug.faults.rate=0,1          | 1    | 2 runs: 1 finished, 1 failed                      |

  Rule: A sweep inside a sweep is refused

    @R13.1 @R13.3
    Scenario Outline: Nested
      When I sweep in the laboratory "<overrides>"
      Then it ends with status 2
      And it says "<message>"

      Examples:
        | overrides                          | message                                                                         |
        | sweep=policies,preemption          | sweep=policies: is a sweep (over workload and scheduler) inside a sweep         |
        | experiment=contiguous_vs_paged,null | experiment=contiguous_vs_paged: is a sweep (over kv) inside a sweep            |

  Rule: The best settings within a memory are searched for

    @R13.3 @slow @tracked
    Scenario: A search within a budget
      When I tune in the laboratory "optimize=throughput/output_tokens_per_s memory=68MiB trials=2"
      Then it ends with status 0
      And it says "throughput/output_tokens_per_s within 68.0 MiB: 2 trials"
      And it ends with a command line whose run fits in "68MiB"
      And it drew what it tried
      When I tune in the laboratory "optimize=throughput/output_tokens_per_s memory=68MiB trials=2"
      Then it says "2 trials, 2 done before"

    @R13.1
    Scenario: A budget smaller than the weights
      When I tune in the laboratory "optimize=throughput/output_tokens_per_s memory=100KiB trials=2"
      Then it ends with status 2
      And it says "memory=100.0 KiB: qwen3_tiny needs"

  Rule: The first comparison that a user runs shows what paging gains

    @R10.3 @R4.1 @tracked
    Scenario: Slots as long as the model allows, pages, and shared pages in the same bytes
      When I sweep in the laboratory "experiment=contiguous_vs_paged kv.memory=4MiB model.max_seq_len=4096 workload.num_requests=24 workload.output_len.min=16 workload.output_len.max=20 figures=true"
      Then it ends with status 0
      And in the same bytes its points had
        | kv             | sequences at once | prompt tokens from the cache |
        | contiguous     | 2                 | 0                            |
        | paged_unshared | 19                | 0                            |
        | paged          | 24                | 8832                         |
      And it says "(12.0 times)"
      And it names the figures of the comparison

    @R23.8
    Scenario Outline: On a machine of <rate> numbers multiplied a second, and <asked>
      Given a machine whose measured rate is <rate> numbers multiplied a second
      When I compare slots and pages there with short requests, and "<asked>"
      Then it ends with status 0
      And each of its 3 runs served <count> requests
      And it says of fewer requests "<line>"

      Examples:
        | rate | asked                       | count | line                                                                                                                                                             |
        | 1e12 | figures=false               | 64    | nothing                                                                                                                                                          |
        | 1e6  | figures=false               | 16    | note: 16 requests in place of 64: at this machine's measured rates 64 would take about ..., more than hydra.sweeper.within_s=45; workload.num_requests=64 serves all |
        | 1e6  | workload.num_requests=20    | 20    | nothing                                                                                                                                                          |
        | 1e6  | hydra.sweeper.within_s=null | 64    | nothing                                                                                                                                                          |
