Feature: Planning a fleet
  How many replicas a workload takes, which router, and what each replica did.

  Background:
    Given a laboratory with a store of its own

  @R28.10
  Scenario: A picture of all replicas over time
    When I sweep in the laboratory "executor=simulated hardware=l4 fleet.replicas=3,1 figures=true"
    Then it ends with status 0
    And the first run has the figure "fleet.png" in place of "memory.png", the second the other

  @R28.11 @tracked
  Scenario: The least number of replicas that serves a workload in time
    When I tune in the laboratory "find=replicas executor=simulated hardware=l4 framework.step_us=200 framework.sequence_us=5 framework.token_us=0 scheduler.max_batch_size=1 slo.ttft_ms=1 workload.arrival=uniform workload.rate=1600"
    Then it ends with status 0
    And it says "least: fleet.replicas=2: 100.0 % within"
    And it says "below it: fleet.replicas=1: 66.7 % within"
    And the store holds the search with 2 finished runs, and its fleet.replicas is 2
    And it leaves the files "replicas.csv replicas.png"

  @R28.11
  Scenario Outline: <arguments> has no answer
    When I tune in the laboratory "find=replicas executor=simulated hardware=l4 <arguments>"
    Then it ends with status <status>
    And it says "<message>"

    Examples:
      | arguments                                               | status | message                                                                |
      | slo.ttft_ms=0.001 fleet.replicas=2                      | 1      | no number of replicas holds: even fleet.replicas=2, the most tried, has 0.0 % within, goodput 0.00 req/s; fleet.replicas=1 keeps as many, so that more do not help |
      | workload.arrival=uniform workload.rate=800              | 2      | find=replicas: needs a limit; set slo.ttft_ms, slo.tpot_ms or both     |
      | slo.ttft_ms=1 engine=openai engine.url=http://localhost | 2      | find=replicas: takes replicas of kvlab's own engine                    |
      | slo.ttft_ms=1 fleet.groups=[{count:2},{count:1,kv.num_blocks:64}] | 2 | find=replicas lets one group grow: leave its count out, and give fleet.replicas, the most of all |

  @R28.13 @tracked
  Scenario: The split of prefill and decode that serves most requests in time
    When I tune in the laboratory "find=split executor=simulated hardware=l4 fleet.replicas=3 slo.tpot_ms=1 workload.arrival=uniform workload.rate=1600"
    Then it ends with status 0
    And it says "no split"
    And it says "1 : 2"
    And it says "2 : 1"
    And it says "best: "
    And it says "of 3 runs"
    And it leaves the files "split.csv split.png"

  @R28.27
  Scenario: The fewest replicas of a group that grow beside another
    When I tune in the laboratory "find=replicas executor=simulated hardware=l4 framework.step_us=200 framework.sequence_us=5 framework.token_us=0 slo.ttft_ms=1 workload.arrival=uniform workload.rate=1600 fleet.replicas=8 fleet.groups=[{count:1,kv.num_blocks:64,scheduler.max_batch_size:1},{hardware:h100_sxm,scheduler.max_batch_size:1}]"
    Then it ends with status 0
    And it says "from 2 to 8, beginning at 2"
    And it says "least: fleet.replicas=2: 100.0 % within"

  @R28.27
  Scenario: The split of two kinds of devices
    When I tune in the laboratory "find=split executor=simulated hardware=l4 fleet.replicas=4 slo.tpot_ms=1 workload.arrival=uniform workload.rate=1600 fleet.groups=[{role:prefill,hardware:h100_sxm,executor.tensor_parallel:2},{role:decode,count:1},{role:decode,hardware:l40s}]"
    Then it ends with status 0
    And it says "from 1 to 2, beginning at 1"
    And it says "1 : 3"
    And it says "2 : 2"
    And it says "of 2 runs"

  @R28.6
  Scenario Outline: What only the first point of find=<find> could run is refused before it
    When I tune in the laboratory "find=<find> executor=simulated hardware=l4 slo.ttft_ms=1 kv.prefix_sharing=false workload.arrival=uniform workload.rate=1600 <settings>"
    Then it ends with status 2
    And it says "error: <message>: needs a prefix cache"

    Examples:
      | find     | settings                 | message                  |
      | replicas | fleet.router=cache_aware | fleet.router=cache_aware |
      | split    | fleet.replicas=3         | fleet.prefill=2          |

  @R28.27
  Scenario: Groups with roles and counts are a split already
    When I tune in the laboratory "find=split executor=simulated hardware=l4 slo.ttft_ms=1 fleet.groups=[{role:prefill,count:1},{role:decode,count:1}]"
    Then it ends with status 2
    And it says "find=split needs one of each role without a count, which share what others leave of fleet.replicas"

  @R28.13
  Scenario: One replica cannot be split
    When I tune in the laboratory "find=split executor=simulated hardware=l4 slo.ttft_ms=1"
    Then it ends with status 2
    And it says "fleet.replicas=1: leaves nothing to split; find=split needs at least 2"

  @R28.12 @R28.22
  Scenario: A sweep over routers
    When I sweep in the laboratory "sweep=routers fleet.router=round_robin,precise executor=simulated hardware=l4 model.max_seq_len=4096 workload.num_requests=60 kv.num_blocks=700 workload.rate=2000 figures=true"
    Then it ends with status 0
    And it says "2 runs: 2 finished"
    And behind "precise" more prompt tokens were found than behind "round_robin"
    And the sweep has the picture "router_hits.png", and each run "prefixes.png"
