Feature: Fleets of unequal replicas
  Groups of replicas with devices, memory and limits of their own behind one router.

  Rule: A group has settings of its own, and everything that shows its replicas names it

    @R28.14 @tracked
    Scenario: Two replicas on one device, and one on another with a smaller pool
      When I run "executor=simulated hardware=h100_sxm kv.num_blocks=64 workload.num_requests=9 fleet.groups=[{count:2},{count:1,hardware:l4,kv.num_blocks:8}]" on a tiny model
      Then the command succeeds
      And the message says "simulated 2 of h100_sxm and 1 of l4 num_blocks=8, timing ... 3 replicas behind round_robin"
      And the message says "1 of l4 num_blocks=8: KV cache: 8 blocks of 16 tokens"
      And the message says "steps of up to 2,048 tokens and 256 sequences"
      And each request's row has the group of its replica: "h100_sxm, h100_sxm, l4 num_blocks=8"
      And its metrics have 2176 as "capacity/token_slots"

    @R28.14
    Scenario: One group of the run's own settings is the run with so many replicas
      When I run "executor=simulated hardware=l4 kv.num_blocks=40 workload.num_requests=8 fleet.router=precise fleet.replicas=3" on a tiny model
      And I run "executor=simulated hardware=l4 kv.num_blocks=40 workload.num_requests=8 fleet.router=precise fleet.groups=[{count:3}]" on a tiny model
      Then both runs have the same requests.parquet and steps.parquet, byte for byte

    @R28.14 @tracked
    Scenario: Prompts on one kind of device, decoding on another
      When I run "executor=simulated kv.num_blocks=40 workload.num_requests=4 fleet.groups=[{count:2,role:decode,hardware:l4},{count:1,role:prefill,hardware:h100_sxm}]" on a tiny model
      Then the command succeeds
      And the replicas of its requests are "1 2 1 2"
      And each request's row has the group of its replica: "prefill h100_sxm, decode l4, decode l4"
      And its metrics have 4 as "fleet/transfers"

    @R28.27
    Scenario Outline: <groups> of 5 replicas<of>
      When I run "executor=simulated hardware=h100_sxm kv.num_blocks=64 workload.num_requests=4 fleet.replicas=5 fleet.groups=<groups> <settings>" on a tiny model
      Then the command succeeds
      And the message says "simulated <devices>, timing"

      Examples: who has no count has what others leave
        | groups                                                                            | of                | settings        | devices                   |
        | [{name:a,count:2},{name:b}]                                                       |                   |                 | 2 of a and 3 of b         |
        | [{count:3},{kv.num_blocks:64},{count:1,kv.num_blocks:64}]                         |                   |                 | 3 of h100_sxm and 1 of num_blocks=64 and 1 of num_blocks=64 (2) |
        | [{name:a,role:prefill},{name:b,role:decode}]                                      |                   |                 | 1 of a and 4 of b         |
        | [{name:a,role:prefill},{name:b,role:decode}]                                      | , 3 that prefill  | fleet.prefill=3 | 3 of a and 2 of b         |
        | [{name:c,role:decode},{name:a,role:prefill},{name:b,role:prefill,count:2}]        | , 3 that prefill  | fleet.prefill=3 | 1 of a and 2 of b and 2 of c |

  Rule: A group that cannot work is refused by its name

    @R28.14
    Scenario Outline: <groups> is refused
      When I run "executor=simulated hardware=h100_sxm kv.num_blocks=64 fleet.groups=<groups> <settings>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | groups                                   | settings            | message |
        | [{count:2},{count:1,kv.num_bloks:8}]     |                     | fleet.groups[1].kv.num_bloks=8: unknown; did you mean kv.num_blocks? |
        | [{count:2,hardware:h100}]                |                     | fleet.groups[0].hardware=h100: unknown; known: ... did you mean h100_sxm? |
        | [{count:2,kv:{num_blocks:0}}]            |                     | fleet.groups[0].kv.num_blocks=0: must be a number, at least 1 |
        | [{count:two}]                            |                     | needs a count of replicas, a whole number, as {count: 2, hardware: l40s} |
        | [{count:1,name:a},{count:1},{count:1,name:a}] |                     | fleet.groups[0].name=a: is the name of fleet.groups[2] too, and their requests could not be told apart |
        | [{count:true}]                           |                     | needs a count of replicas, a whole number, as {count: 2, hardware: l40s} |
        | [1]                                      |                     | fleet.groups=[1]: must be a list of groups, as 'fleet.groups=[{count:2,hardware:l40s}]' |
        | [{count:2},{kv.num_blocks:8}]            |                     | fleet.replicas=1: leaves none for the group num_blocks=8 of fleet.groups, which has no count; take more, or give it one, as {count: 2} |
        | [{kv.num_blocks:8},{kv.num_blocks:9}]    | fleet.replicas=4    | fleet.groups=num_blocks=8 and num_blocks=9: have no count of replicas; one group may be without, or one of each role |
        | [{count:2,model.name:other}]             |                     | fleet.groups[0].model.name=other: replicas behind a router serve one model |
        | [{count:2,seed:3}]                       |                     | fleet.groups[0].seed=3: is no setting of a group; it has count, name, role |
        | [{count:2,role:prefill},{count:1}]       |                     | fleet.groups=['prefill', None]: a role for each group |
        | [{count:2},{count:1}]                    | fleet.replicas=2    | fleet.replicas=2: fleet.groups has 3; leave fleet.replicas out |
        | [{count:2},{count:1}]                    | fleet.groups.2.count=2 | fleet.groups.2.count=2: is of no group that is written before it; the first is 0 |
        | [{count:2},{count:1,kv.num_blocks:1}]    |                     | the group num_blocks=1 of fleet.groups: ... |
        | [{count:1},{count:1,kv.block_size:8}]    | fleet.prefill=1     | fleet.prefill=1: blocks are pulled as they are, and fleet.groups have 16 tokens in float32 and 8 tokens in float32 |
        | [{count:1},{count:1,executor.tensor_parallel:4}] | fleet.prefill=1 | fleet.prefill=1: blocks are pulled as they are, and devices beyond the model's 2 KV heads hold copies of them; give all groups one executor.tensor_parallel, or none above 2 |
        | [{count:1},{count:1,kv.windows:false}]   | fleet.prefill=1 model=gemma3_tiny | fleet.prefill=1: blocks are pulled as they are, and fleet.groups keep other windows; give all one model.max_seq_len, kv.windows |

  Rule: The planner says what fits on a replica of each

    @R28.15
    Scenario: The model of a fleet on two kinds of devices
      When I plan "model=qwen3_8b executor=simulated fleet.groups=[{count:4,hardware:h100_sxm},{count:2,hardware:l4,name:small}] lengths=1000"
      Then the planner says "each replica of h100_sxm, qwen3_8b"
      And the planner says "23,988 blocks"
      And the planner says "each replica of small, qwen3_8b"
      And the planner says "838 blocks"

    @R28.15
    Scenario: A group whose devices are too small for the model
      When I plan "model=qwen3_14b executor=simulated fleet.groups=[{count:4,hardware:h100_sxm},{count:2,hardware:l4}]"
      Then the command fails without a traceback
      And the message says "the group l4 of fleet.groups: "
