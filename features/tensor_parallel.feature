Feature: More than one process
  executor.tensor_parallel processes, ranks, compute one model: each has a part of the heads, with their K and V, of the
  columns and of the vocabulary. Rank 0 has the scheduler, the block tables and the sampler.

  Rule: Two ranks give what one process gives

    @R31.1
    Scenario Outline: The tokens with <settings>
      When a tiny model is run with "<settings>" and with "<settings> executor.tensor_parallel=2"
      Then both runs gave the same tokens
      And the message says "2 ranks, 2 threads"

      Examples:
        | settings                                                                  |
        | kv=contiguous model=llama_tiny attention=sdpa                             |
        | kv.num_blocks=6 scheduler.max_batched_tokens=48 scheduler.admission_reserve=0 |

    @R31.2
    Scenario: A sweep over the number of ranks
      When I sweep "executor.tensor_parallel=1,2" on a tiny model
      Then the command succeeds
      And the message says "tensor_parallel=2"

  Rule: The memory of ranks is planned

    @R31.3
    Scenario: The planner says what each rank has
      When I plan "model=qwen3_0_6b memory=8GiB tensor_parallel=2"
      Then the message says "ranks ... 2 ... each with 569.0 MiB of weights"

  Rule: Ranks end together

    @R31.4
    Scenario: A rank that dies ends the run
      When I start a run of two ranks that would take minutes and kill rank 1 once it produces tokens
      Then the command fails without a traceback
      And the message says "executor.tensor_parallel=2: rank 1 of 2 ended (killed by SIGKILL, as the system does when memory runs out), so that nothing more can be computed; start again"
      And no rank of it is left

    @R31.5
    Scenario Outline: No rank outlives a run that gets <signal>
      When I start a run of two ranks that would take minutes and send it <signal> once it produces tokens
      Then no rank of it is left

      Examples:
        | signal  |
        | SIGINT  |
        | SIGKILL |

  Rule: What cannot be divided is named

    @R31.6
    Scenario Outline: <override>
      When I run "<override>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | override                                              | message                                                                                              |
        | model=gemma3_tiny executor.tensor_parallel=2          | executor.tensor_parallel=2: gemma3_text has 1 KV heads, which cannot be divided so; 1 would do       |
        | executor.tensor_parallel=4096                         | executor.tensor_parallel=4096: is more ranks than the ... cores that this process may use            |
        | executor.tensor_parallel=2 kv.offload=64MiB           | kv.offload=64MiB: copies the blocks of one process ... leave it null                                 |
        | executor.tensor_parallel=2 debug.profile=true         | debug.profile=True: times the parts of one process ... leave it out                                  |
