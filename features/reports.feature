Feature: Reports
  Runs are compared with one command, which says that they differ only where their repeats show it.

  Rule: A sweep with repeats becomes a table, Markdown and a page

    @R13.6 @tracked
    Scenario: Two memories in one sweep
      When I sweep "repeats=2 kv=contiguous,paged" on a tiny model
      And I report on that sweep
      Then the command succeeds
      And the message says "kv=paged is ... kv=contiguous ... % interval ... 2 pairs"
      And the report says "greedy outputs of kv=contiguous, kv=paged: equal for 4 requests"
      And the page and the Markdown of the report have every configuration
      And nothing is said of "redicted: nine"
      When I report on that sweep by its id in the tracking store
      Then the command succeeds
      And the report says "greedy outputs of kv=contiguous, kv=paged: equal for 4 requests"

    @R13.6 @R14.1
    Scenario: Two simulated devices differ in what was asked for, and have no outputs
      When I sweep "repeats=2 executor=simulated executor.timing=roofline hardware=l4,h100_sxm" on a tiny model
      And I report on that sweep
      Then the command succeeds
      And the report says "not comparable (simulated l4, timing roofline: no tokens were computed)"
      And nothing is said of "equal for"
      And nothing is said of "not all on the same"

    @R13.6 @R14.1
    Scenario: A measured run beside a simulated one is said to be
      When a tiny model is run with "executor=cpu" and with "executor=simulated executor.timing=roofline hardware=l4"
      And I report on those two
      Then the command succeeds
      And the report says "Runs: 1 measured, 1 simulated."

  Rule: A difference gets a word only where the interval says so

    @R13.6
    Scenario Outline: Five repeats in turns
      Given five repeats of a configuration on a machine that slows down, and of another that makes <factor> times the tokens
      When I report on the two
      Then the verdict on output tokens is "<word>"
      And the verdict on first token, p50 is "<word>"
      And the interval of output tokens is Student's for the logarithms of the five ratios

      Examples:
        | factor | word   |
        | 1.0    | same   |
        | 0.8    | slower |
        | 1.25   | faster |

    @R13.6
    Scenario Outline: Five repeats that vary by <percent> %, and others that make <factor> times the tokens
      Given five repeats of a configuration that vary by <percent> %, and of another that makes <factor> times the tokens
      When I report on the two
      Then the verdict on output tokens is "<word>"
      And the interval of output tokens is Student's for the logarithms of the five ratios

      Examples:
        | percent | factor | word   |
        | 3       | 0.9    | slower |
        | 30      | 0.9    | same   |
        | 3       | 1.1    | faster |
        | 30      | 1.1    | same   |

    @R13.6
    Scenario: One run each has no verdict
      Given one run of a configuration, and one of another that makes 0.8 times the tokens
      When I report on the two
      Then the verdict on output tokens is ""
      And the message says "kv.block_size=32 against kv.block_size=16: ... −20.0 % ... no interval and no verdict"

  Rule: A gate fails by exit code and says why

    @R13.7
    Scenario Outline: A limit: <condition>
      Given five repeats of a configuration on a machine that slows down, and of another that makes 0.9 times the tokens
      When I report on the two with "fail_if=<condition>"
      Then the command ends with status <code>
      And the message says "<message>"

      Examples:
        | condition                                                                | code | message                                                            |
        | throughput/output_tokens_per_s < -5%                                     | 3    | failed: throughput/output_tokens_per_s of kv.block_size=32 ... kv.block_size=16: -1 |
        | throughput/output_tokens_per_s < -15%                                    | 0    | passed: throughput/output_tokens_per_s of kv.block_size=32 ... kv.block_size=16: -1 |
        | latency/ttft_ms_p50 > 5%                                                 | 3    | failed: latency/ttft_ms_p50 of kv.block_size=32 ... kv.block_size=16: +1            |
        | latency/ttft_ms_p50 > 15%                                                | 0    | passed: latency/ttft_ms_p50 of kv.block_size=32 ... kv.block_size=16: +1            |
        | throughput/output_tokens_per_s < -15%, latency/ttft_ms_p50 > 5%          | 3    | passed: throughput ... failed: latency/ttft_ms_p50                  |

  Rule: A mistake is named in a sentence

    @R13.6
    Scenario Outline: What cannot be reported
      Given one run of a configuration, and one of another that makes 0.8 times the tokens
      When I report on the two with "<setting>"
      Then the command ends with status 2
      And the message says "error: <message>"

      Examples:
        | setting                                              | message                                                      |
        | metrics=throughput/tokens                            | metrics=throughput/tokens: ... throughput/output_tokens_per_s |
        | filter=tags.x = 'y' tracking.uri=sqlite:////no/where | tracking.uri=sqlite:////no/where                             |
        | 0123456789                                           | 0123456789: ... id                                           |
        | by=kv.backnd                                         | by=kv.backnd: ... kv.backend                                 |

    @R13.6
    Scenario: Runs of different work
      Given two runs of different requests
      When I report on the two
      Then the command ends with status 2
      And the message says "error: ... cannot be compared: ... workload.num_requests ... force=true"
