Feature: Service levels
  How many requests were served as fast as they have to be.

  Rule: Goodput counts the requests within the limits

    @R16.1 @tracked
    Scenario: Half of the requests get their first token in time
      When I run "executor=simulated hardware=l4 scheduler.max_batch_size=1" on a tiny model
      And I run it again with a limit that the first tokens of 2 requests are within
      Then the command succeeds
      And 2 of 4 requests are within the limits, and the goodput is as many in its duration
      And the message says "service levels ... goodput, requests within limits ... 50.0 %"
      And they equal those of summary.json

    @R16.1 @R16.5 @tracked
    Scenario: Requests that are refused are missed
      When I run "scheduler.max_waiting_requests=1 slo.ttft_ms=3600000 slo.tpot_ms=3600000 figures=true" on a tiny model
      Then the command succeeds
      And its folder "figures" holds "memory.png pool_map.png timeline.png latency.png service_levels.png hover.html"
      And 1 of 4 requests are within the limits, and the goodput is as many in its duration

    @R16.1
    Scenario: Without a limit there are no service levels
      When I run "executor=simulated hardware=l4 scheduler.max_batch_size=1" on a tiny model
      Then the run has no service levels

  Rule: Goodput is optimized like any other metric

    @R16.2
    Scenario Outline: A sweep finds the batch with the most <metric>
      When I sweep "executor=simulated hardware=l4 framework.step_us=200 framework.sequence_us=100 framework.token_us=0 slo.tpot_ms=0.45 optimize=<metric> scheduler.max_batch_size=1,2,4" on a tiny model
      Then the command succeeds
      And the message says "goodput, requests within limits"
      And the message says "best: <metric> = ... (scheduler.max_batch_size=<best>)"

      Examples: more at once make more tokens, and with 4 at once no token is in time
        | metric                           | best |
        | slo/goodput_per_s                | 2    |
        | throughput/output_tokens_per_s   | 4    |

    @R16.2 @slow @tracked
    Scenario: A search finds settings by goodput
      Given a laboratory with a store of its own
      When I tune in the laboratory "executor=simulated hardware=l4 slo.ttft_ms=3600000 trials=2"
      Then it ends with status 0
      And it says "slo/goodput_per_s within 20.3 GiB: 2 trials"
      And of the runs that the store holds, its best is the one with the most "slo/goodput_per_s"

  Rule: The largest rate that is served in time is found

    @R16.4 @tracked
    Scenario: A search doubles the rate until too few requests are within the limit
      Given a laboratory with a store of its own
      When I tune in the laboratory "find=rate executor=simulated hardware=l4 framework.step_us=200 framework.sequence_us=5 framework.token_us=0 scheduler.max_batch_size=1 slo.ttft_ms=1 workload.arrival=uniform workload.rate=800 precision=100"
      Then it ends with status 0
      And it says "largest: workload.rate=800: 100.0 % within"
      And it says "above it: workload.rate=1600: 66.7 % within"
      And the store holds the search with 2 finished runs, and its workload.rate is 800
      And it leaves the files "rates.csv rates.png"
      When I tune in the laboratory "find=rate executor=simulated hardware=l4 framework.step_us=200 framework.sequence_us=5 framework.token_us=0 scheduler.max_batch_size=1 slo.ttft_ms=1 workload.arrival=uniform workload.rate=800 precision=100"
      Then it says "measured before: does not"
      And the store holds the search with 2 finished runs, and its workload.rate is 800

    @R16.4
    Scenario Outline: <arguments> has no arrival rate to find
      Given a laboratory with a store of its own
      When I tune in the laboratory "find=rate executor=simulated hardware=l4 <arguments>"
      Then it ends with status 2
      And it says "<message>"

      Examples:
        | arguments                                    | message                                                        |
        | workload.arrival=uniform workload.rate=800   | find=rate: needs a limit; set slo.ttft_ms, slo.tpot_ms or both |
        | slo.ttft_ms=1                                | workload.arrival=burst: all requests at once have no rate      |

  Rule: Limits are checked

    @R16.3
    Scenario Outline: <override>
      When I run "<override>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | override                                           | message                                                                     |
        | slo.ttft_ms=0                                      | slo.ttft_ms=0.0: must be a number, at least 0.001                           |
        | slo.itl_ms=50                                      | slo.itl_ms                                                                  |
        | optimize=slo/goodput_per_s                         | optimize=slo/goodput_per_s: needs a limit; set slo.ttft_ms, slo.tpot_ms     |
        | optimize=slo/tpot_attainment slo.ttft_ms=500       | optimize=slo/tpot_attainment: needs a limit; set slo.tpot_ms                |

    @R16.3
    Scenario: A search without limits
      Given a laboratory with a store of its own
      When I tune in the laboratory "optimize=slo/goodput_per_s trials=2"
      Then it ends with status 2
      And it says "optimize=slo/goodput_per_s: needs a limit; set slo.ttft_ms, slo.tpot_ms or both, in milliseconds"
