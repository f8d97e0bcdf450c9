Feature: Formats of K and V
  K and V take fewer bytes in int8, fp8 and int4, together or each in a format of its own. How many bytes is in the
  scenarios on capacity.

  Rule: A run says what its K and V are stored in, and what that costs

    @R22.1 @tracked
    Scenario Outline: A run with <settings>
      When I run "<settings> workload.num_requests=3" on a tiny model
      Then the command succeeds
      And all 3 requests were completed
      And the message says "<said>"
      And a token's K and V take <bytes> bytes in the pool
      And <keys> of them are its K's with "<settings>"
      And they equal those of summary.json

      Examples:
        | settings                               | said              | bytes | keys |
        | kv.dtype=int8                          | in int8;          | 288   | 144  |
        | kv.dtype=fp8_e4m3                      | in fp8_e4m3;      | 288   | 144  |
        | kv.dtype=fp8_e5m2                      | in fp8_e5m2;      | 288   | 144  |
        | kv.dtype=int4                          | in int4;          | 144   | 72   |
        | kv.key_dtype=int8 kv.value_dtype=int4  | in int8 and int4; | 216   | 144  |

    @R22.1
    Scenario: Fewer bits cost more
      When I run "kv.dtype=int8 workload.num_requests=3" on a tiny model
      And I run "kv.dtype=fp8_e4m3 workload.num_requests=3" on a tiny model
      And I run "kv.dtype=fp8_e5m2 workload.num_requests=3" on a tiny model
      And I run "kv.dtype=int4 workload.num_requests=3" on a tiny model
      Then each has more "quality/kl_mean" than the one before
      When I run "kv.dtype=auto workload.num_requests=3" on a tiny model
      Then it has no metrics of "quality"

  Rule: What a model, a format or an engine cannot do is refused in a sentence

    @R22.2
    Scenario Outline: <settings>
      When I run "<settings>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | settings                                          | message                                                                                                |
        | kv.dtype=int4 model.architecture.head_dim=16      | kv.dtype=int4: has a scale for every 32 numbers, which heads of 16 are no multiple of; use int8, fp8_e4m3 or auto |
        | kv.value_dtype=int4 model.architecture.head_dim=8 | kv.value_dtype=int4: has a scale for every 32 numbers, ... heads of 8                                  |
        | kv.key_dtype=fp8                                  | kv.key_dtype=fp8: which one? fp8_e4m3 (4 bits of exponent, 3 of mantissa) or fp8_e5m2                 |
        | kv.key_dtype=int8 model.architecture.head_dim=4 executor.dtype=bfloat16 | kv.key_dtype=int8: with their scales, heads of 4 numbers take                                          |
