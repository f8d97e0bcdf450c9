Feature: How far predicted figures may be off
  Where a figure is predicted, how far such predictions were off is said beside it.

  @R29.22 @R30.10
  Scenario: A sweep and its report
    Given the tables of measured operations
    When I sweep "executor=simulated executor.dtype=bfloat16 model=qwen3_8b hardware=h100_sxm kv.num_blocks=64 workload.num_requests=20 scheduler.max_batch_size=1,2" on a tiny model
    Then the message says "predicted: nine of ten measured deployments like this had mean ttft within ... % and tpot within ... %; of ... pairs of measured vllm deployments of dense models half had their ratio predicted within ... %, nine of ten within ... %"
    When I report on that sweep
    Then the report says "Predicted: nine of ten measured deployments like this had mean ttft within"
    And the message says "what to change: kvlab advise hardware=h100_sxm model=qwen3_8b workload=... workload.num_requests=20"

  @R29.23 @R30.10
  Scenario Outline: What is found by <search>
    Given the tables of measured operations
    When I tune on a measured device "<search>"
    Then the message says "predicted: nine of ten measured deployments like this had mean ttft within ... % and tpot within ... %; if that far off, ... to ... % are within the limits<more>"
    And of "measured vllm deployments of dense models had tpot" it is said once
    And the report that it names says as it does what to change

    Examples:
      | search                                                                            | more                                                     |
      | find=rate workload.rate=30 scheduler.max_batch_size=1 slo.ttft_ms=20 precision=100 | ; then workload.rate is less than 30 to 30, of those tried |
      | find=split fleet.replicas=2 slo.ttft_ms=20                                        |                                                          |
      | trials=1 slo.ttft_ms=20 workload.num_requests=20                                  | ...what to change: kvlab advise executor.dtype=bfloat16 model=qwen3_8b hardware=h100_sxm |

  @R29.23
  Scenario: What is found of groups of replicas, and a router that the first of the runs does not ask
    Given the tables of measured operations
    When I tune on a measured device "find=replicas slo.ttft_ms=40 workload.num_requests=20 fleet.replicas=2 fleet.groups=[{count:1,name:large},{name:small,kv.num_blocks:64}]"
    Then the message says "predicted: large: mean ttft ... predicted: small: mean ttft ... predicted: mean ttft"
    And the message says "predicted: nine of ten measured deployments like this had mean ttft within ... %; if that far off, ... to ... % are within the limits"
    And the message says "what to change: kvlab advise ...'fleet.groups=[{count:1,name:large},{name:small,kv.num_blocks:64}]' fleet.replicas=2"
    When I tune on a measured device "find=replicas slo.ttft_ms=20 fleet.router=least_requests"
    Then nothing is said of "fleet.router=least_requests has no effect"

  @R29.24 @R30.10
  Scenario: A pool that is planned
    When I plan "model=llama3_1_8b hardware=b200_sxm"
    Then the message says "The size of the pool is planned: nine of ten of 13 published starts of vllm had pools within 3 %; none was on b200_sxm."
    And the message says "what to change: kvlab advise workload=recorded workload.path=mine.jsonl model=llama3_1_8b hardware=b200_sxm"
    When I plan "model=llama3_1_8b hardware=b200_sxm kv.num_blocks=100"
    Then nothing is said of "is planned"
    When I plan "model=qwen3_tiny kv.num_blocks=100"
    Then nothing is said of "what to change"
    When I plan "model=llama3_1_8b hardware=b200_sxm fleet.groups=[{count:2},{count:1,kv.num_blocks:5000}]"
    Then the message says "what to change: kvlab advise workload=... 'fleet.groups=[{count:2},{count:1,kv.num_blocks:5000}]'"
