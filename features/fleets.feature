Feature: Fleets
  Several replicas of an engine behind a router, on one clock.

  Rule: Requests are spread over replicas, and a run says what each of them did

    @R28.1
    Scenario: Four replicas take turns
      When I run "executor=simulated hardware=h100_sxm kv.memory=1MiB workload.num_requests=8 fleet.replicas=4" on a tiny model
      Then the command succeeds
      And all 8 requests were completed
      And the message says "timing roofline ... 4 replicas behind round_robin"
      And the replicas of its requests are "0 1 2 3 0 1 2 3"
      And its routes.parquet has a row for each request, to the same replicas
      And its metrics have 4 as "fleet/replicas" and four times the bytes of one replica as KV cache

    @R28.1
    Scenario: Replicas that compute here have clocks of their own and the tokens of one engine
      When I run "workload.num_requests=6" on a tiny model
      And I run "workload.num_requests=6 fleet.replicas=2 fleet.router=least_requests" on a tiny model
      Then the command succeeds
      And both runs have the same output tokens

    @R28.2
    Scenario: The same settings give the same records
      When I run "executor=simulated hardware=l4 kv.memory=1MiB workload.arrival=poisson workload.rate=5 fleet.replicas=3 fleet.router=precise workload.system_len=16 figures=true" on a tiny model twice
      Then both runs have the same requests.parquet and steps.parquet, byte for byte
      And both runs have the same prefixes.parquet and figures/hover.html, byte for byte

  Rule: A router knows what its view tells it, which may be late or lost

    @R28.3
    Scenario Outline: Prompts with one prefix go to one replica where <view> knows of it
      When I run "executor=simulated hardware=l4 kv.memory=1MiB kv.block_size=4 workload.num_requests=12 workload.arrival=uniform workload.rate=2 workload.num_groups=3 workload.group_len=16 fleet.replicas=3 <settings>" on a tiny model
      Then the command succeeds
      And <requests> requests went where one with their prefix had been before

      Examples:
        | view                         | settings                                                                                 | requests |
        | the replicas' caches         | fleet.router=precise fleet.prefixes=exact fleet.weights.kv=0 fleet.weights.queue=0                   | all      |
        | KV events                    | fleet.router=precise fleet.weights.kv=0 fleet.weights.queue=0                                        | all      |
        | the router's own memory      | fleet.router=estimated fleet.weights.kv=0 fleet.weights.queue=0                                      | all      |
        | nothing, as events were lost | fleet.router=precise fleet.events_lost=1 fleet.weights.kv=0 fleet.weights.queue=0                    | not all  |
        | nothing, as events are late  | fleet.router=precise fleet.events_ms=1e9 fleet.weights.kv=0 fleet.weights.queue=0                    | not all  |

  Rule: Prefill and decode may be apart

    @R28.4 @tracked
    Scenario: Prompts are computed on one replica and pulled by the other
      When I run "executor=simulated hardware=h100_sxm kv.memory=1MiB kv.block_size=4 workload.num_requests=6" on a tiny model
      And I run "executor=simulated hardware=h100_sxm kv.memory=1MiB kv.block_size=4 workload.num_requests=6 fleet.replicas=2 fleet.prefill=1" on a tiny model
      Then the command succeeds
      And both runs have the same output tokens
      And the replicas of its requests are "1 1 1 1 1 1"
      And the message says "replica ... ended ... prompts ... found ... pulled ... outputs"
      And the message says "0 ... 0 ... 127 ... 0.0 % ... 0 ... 1 ... 6 ... 0 ... - ... 116 ... 109"
      And its metrics have 6 as "fleet/transfers"
      And no block leaked

    @R28.4
    Scenario: Larger blocks are fewer pieces
      When I run "executor=simulated hardware=h100_sxm kv.memory=1MiB workload.num_requests=1 fleet.replicas=2 fleet.prefill=1 fleet.link.piece_us=1000 kv.block_size=<size>" for each of these settings
        | size |
        | 8    |
        | 4    |
        | 2    |
      Then each takes longer to pull than the one before

    @R28.4
    Scenario: Short prompts are computed where they decode
      When I run "executor=simulated hardware=h100_sxm kv.memory=1MiB kv.block_size=4 fleet.replicas=2 fleet.prefill=1 fleet.split_tokens=1000" on a tiny model
      Then the command succeeds
      And its metrics have nothing as "fleet/transfers"

    @R28.21
    Scenario: Blocks are reserved first, and layers go as they are computed
      When I run "executor=simulated hardware=h100_sxm kv.memory=1MiB kv.block_size=4 workload.num_requests=6" on a tiny model
      And I run "executor=simulated hardware=h100_sxm kv.memory=1MiB kv.block_size=4 workload.num_requests=6 fleet.replicas=2 fleet.prefill=1 fleet.handshake=decode_first fleet.link.send=layer" on a tiny model
      Then the command succeeds
      And both runs have the same output tokens
      And its routes.parquet has the stages "decode prefill" of each request
      And its metrics have 6 as "fleet/transfers"
      And no block leaked

    @R28.21
    Scenario: The less goes at once, the less of it shows behind the prompt
      When I run "executor=simulated hardware=h100_sxm kv.memory=1MiB kv.block_size=4 workload.num_requests=1 workload.prompt_len=40 scheduler.max_batched_tokens=16 fleet.replicas=2 fleet.prefill=1 fleet.handshake=decode_first fleet.link.setup_us=0 fleet.link.send=<send>" for each of these settings
        | send   |
        | layer  |
        | chunk  |
        | prompt |
      Then each takes longer to pull than the one before

    @R28.26
    Scenario Outline: Of a prompt of which two layers of three <see> <bytes> bytes are sent
      When I run "executor=simulated hardware=h100_sxm model=gemma3_tiny model.max_seq_len=128 kv.num_blocks=64 kv.block_size=8 workload.num_requests=1 workload.prompt_len=96 fleet.replicas=2 fleet.prefill=1 <settings>" on a tiny model
      Then the command succeeds
      And its metrics have 1 as "fleet/transfers"
      And its metrics have <bytes> as "fleet/transfer_bytes"
      And no block leaked

      Examples: a token of a layer is 256 bytes
        | see                     | settings                                                                    | bytes |
        | see the last 32 tokens  | fleet.handshake=prefill_first                                               | 40960 |
        | see the last 32 tokens  | fleet.handshake=decode_first fleet.link.send=layer                          | 40960 |
        | keep all 96 tokens      | kv.windows=false                                                            | 73728 |

    @R28.18 @tracked
    Scenario: Beside a split those that prefill read and write the store
      When I run "executor=simulated hardware=l4 kv.num_blocks=40 kv.block_size=4 workload.num_requests=6 workload.arrival=uniform workload.rate=4 workload.group_len=16 fleet.replicas=3 fleet.prefill=2 fleet.store=1MiB" on a tiny model
      Then all 6 requests were completed
      And 5 requests found 16 tokens or more, and no block leaked
      And its metrics have 16 as "fleet/store_hit_tokens"

    @R28.24
    Scenario Outline: <who> swap to tiers of their own what is preempted
      When I run "executor=simulated hardware=l4 kv.num_blocks=12 kv.block_size=4 workload.num_requests=8 workload.prompt_len=16 workload.output_len=16" on a tiny model
      And I run "executor=simulated hardware=l4 kv.num_blocks=12 kv.block_size=4 workload.num_requests=8 workload.prompt_len=16 workload.output_len=16 kv.offload=1MiB scheduler.preemption.mode=swap <settings>" on a tiny model
      Then all 8 requests were completed
      And both runs have the same output tokens
      And its metrics have <blocks> as "kv/swapped_out_blocks"
      And no block leaked

      Examples:
        | who                             | settings                                                      | blocks |
        | Replicas that decode            | fleet.replicas=2 fleet.prefill=1                              | 36     |
        | Replicas that reserve blocks    | fleet.replicas=2 fleet.prefill=1 fleet.handshake=decode_first | 36     |
        | Replicas that pull from another | fleet.replicas=2 fleet.neighbours=true fleet.pull=always      | 42     |

  Rule: Replicas die, drain and return

    @R28.5 @tracked
    Scenario: What a replica had is computed again by another
      When I run "executor=simulated hardware=l4 kv.memory=1MiB workload.num_requests=8 fleet.replicas=2 fleet.life=[0.00001:die:1]" on a tiny model
      Then the command succeeds
      And all 8 requests were completed
      And the replicas of its requests are "0 0 0 0 0 0 0 0"
      And its metrics have 4 as "fleet/retried"
      And its metrics have 81 as "fleet/lost_tokens"

    @R28.5
    Scenario: A replica that drains ends what it has, and gets no more
      When I run "executor=simulated hardware=l4 kv.memory=1MiB workload.num_requests=8 workload.arrival=uniform workload.rate=1 fleet.replicas=2 fleet.life=[2.5:drain:1,5.5:return:1]" on a tiny model
      Then all 8 requests were completed
      And the replicas of its requests are "0 1 0 0 0 0 0 1"

    @R28.30
    Scenario: A run that ends before an event says that it did not happen
      When I run "executor=simulated hardware=l4 kv.memory=1MiB workload.num_requests=8 fleet.replicas=2 fleet.life=[900:die:1]" on a tiny model
      Then the command succeeds
      And the message says "warning: fleet.life=900:die:1 did not happen: the run ended at 0."

    @R28.30
    Scenario Outline: What blocks are pulled over, with <settings>, stands beside the run
      When I run "executor=simulated hardware=l4 kv.memory=1MiB workload.num_requests=2 fleet.replicas=2 <settings>" on a tiny model
      Then the command succeeds
      And the message says "K and V go between replicas at <rate>"

      Examples:
        | settings                            | rate                                                                             |
        | fleet.prefill=1                     | 40 GB/s for each device (fleet.link.gb_s), 400 Gbit/s Ethernet unless set        |
        | fleet.prefill=1 fleet.link.gb_s=12  | 12 GB/s for each device (fleet.link.gb_s)                                        |

    @R28.25
    Scenario Outline: Beside a split <what>
      When I run "executor=simulated hardware=h100_sxm kv.memory=1MiB kv.block_size=4 workload.num_requests=1" on a tiny model
      And I run "executor=simulated hardware=h100_sxm kv.memory=1MiB kv.block_size=4 workload.num_requests=1 fleet.replicas=4 fleet.prefill=2 fleet.link.setup_us=1e6 fleet.life=[0.5:<life>]" on a tiny model
      Then the command succeeds
      And both runs have the same output tokens
      And the replicas of its requests are "<replica>"
      And its routes.parquet has the stages "<stages>" of each request
      And its metrics have <retried> as "fleet/retried"
      And its metrics have <lost> as "fleet/lost_tokens"
      And no block leaked

      Examples:
        | what                                                          | life    | replica | stages                        | retried | lost |
        | what a dead replica has computed is computed where it decodes | die:0   | 2       | prefill decode                | 0       | 23   |
        | what a dead replica was to decode begins again                | die:2   | 3       | prefill decode prefill decode | 1       | 0    |
        | a replica that drains sends what it has                       | drain:0 | 2       | prefill decode                | 0       | 0    |

  Rule: Replicas may have a store in common

    @R28.18
    Scenario: A prefix that another replica has computed is loaded
      When I run "executor=simulated hardware=l4 kv.num_blocks=40 kv.block_size=4 workload.num_requests=6 workload.arrival=uniform workload.rate=4 workload.group_len=16 fleet.replicas=3 fleet.store=1MiB" on a tiny model
      Then all 6 requests were completed
      And 5 requests found 16 tokens or more, and no block leaked
      And its metrics have 32 as "fleet/store_hit_tokens"

    @R28.23
    Scenario Outline: A router that counts what the store holds <what>
      When I run "executor=simulated hardware=l4 kv.num_blocks=40 kv.block_size=4 workload.num_requests=6 workload.arrival=uniform workload.rate=4 workload.group_len=16 workload.num_groups=1 fleet.replicas=3 fleet.store=1MiB fleet.router=precise fleet.weights.kv=0 fleet.weights.queue=0 <settings>" on a tiny model
      Then all 6 requests were completed
      And 5 requests found 16 tokens or more, and no block leaked
      And <requests> requests were sent to the replica of the first

      Examples:
        | what                              | settings               | requests |
        | not, stays where the prefix is    | fleet.store_weight=0   | all      |
        | in full, is free to go elsewhere  | fleet.store_weight=1   | not all  |

  Rule: A replica may pull a prefix that another has

    @R28.29
    Scenario Outline: Of a prompt of which two layers of three <see> <blocks> blocks come <whence>
      When I run "executor=simulated hardware=l4 model=gemma3_tiny model.max_seq_len=256 kv.num_blocks=96 kv.block_size=8 workload.num_requests=2 workload.group_len=96 workload.num_groups=1 workload.arrival=uniform workload.rate=4 fleet.replicas=2 <settings>" on a tiny model
      Then all 2 requests were completed
      And 1 request found 96 tokens or more, and no block leaked
      And its metrics have <figure> as "<metric>"

      Examples: a block of one layer of each group is 2,048 bytes
        | see                    | whence           | settings                                                  | blocks | figure | metric                   |
        | see the last 32 tokens | from a store     | fleet.store=1MiB                                          | 20     | 20     | fleet/store_loaded_blocks |
        | keep all 96 tokens     | from a store     | fleet.store=1MiB kv.windows=false                         | 12     | 12     | fleet/store_loaded_blocks |
        | see the last 32 tokens | from a neighbour | fleet.neighbours=true fleet.pull=always                   | 20     | 40960  | fleet/pulled_bytes       |
        | keep all 96 tokens     | from a neighbour | fleet.neighbours=true fleet.pull=always kv.windows=false  | 12     | 73728  | fleet/pulled_bytes       |

    @R28.19 @R28.20
    Scenario Outline: A prefix that another replica has computed is pulled <when>
      When I run "executor=simulated hardware=l4 kv.num_blocks=40 kv.block_size=4 workload.num_requests=3 workload.arrival=uniform workload.rate=4 workload.group_len=16 fleet.replicas=3 fleet.neighbours=true <settings>" on a tiny model
      Then all 3 requests were completed
      And <found> requests found 16 tokens or more, and no block leaked
      And its metrics have <tokens> as "fleet/pulled_hit_tokens"
      And its metrics have <twice> as "fleet/duplicate_tokens_peak"
      And its requests pulled "<pulled>" tokens

      Examples:
        | when                        | settings                    | found | tokens | pulled  | twice |
        | where that is cheaper       | fleet.link.setup_us=0 fleet.link.piece_us=0 fleet.link.gb_s=1000 | 2     | 32     | 0 16 16 | 32    |
        | not where computing is      | fleet.link.setup_us=1e6     | 0     | 0      | 0 0 0   | 32    |
        | always where that was asked | fleet.link.setup_us=1000 fleet.pull=always | 2     | 32     | 0 16 16 | 32    |

  Rule: Replicas start and stop as the load asks for

    @R28.17 @tracked
    Scenario: A rate of requests that grows and ends
      When I run "executor=simulated hardware=l4 kv.num_blocks=40 workload.num_requests=12 workload.arrival=uniform workload.rate=4 fleet.replicas=3 fleet.scale.on=rate fleet.scale.target=2 fleet.scale.every_s=1 fleet.scale.warm_up_s=0.5 fleet.scale.down_s=0" on a tiny model
      Then all 12 requests were completed
      And the replicas of its requests are "0 0 0 0 0 0 0 1 0 1 0 1"
      And its scaling.parquet says "1.0 start 1"
      And its metrics have 1 as "fleet/started"
      And its energy is that of "fleet/replicas_mean" replicas of 72 W

    @R28.17
    Scenario: Of a split those that decode start and stop
      When I run "executor=simulated hardware=l4 kv.num_blocks=40 kv.block_size=4 workload.num_requests=12 workload.arrival=uniform workload.rate=4 fleet.replicas=4 fleet.prefill=1 fleet.scale.on=rate fleet.scale.target=2 fleet.scale.every_s=1 fleet.scale.warm_up_s=0.5 fleet.scale.down_s=0" on a tiny model
      Then all 12 requests were completed
      And the replicas of its requests are "1 1 1 1 1 1 1 2 1 2 1 2"
      And its scaling.parquet says "1.0 start 2"

    @R28.28
    Scenario: Of a split those that prefill start and stop by a rule of their own
      When I run "executor=simulated hardware=h100_sxm kv.num_blocks=40 kv.block_size=4 workload.num_requests=12 workload.arrival=uniform workload.rate=4 fleet.replicas=4 fleet.prefill=2 fleet.prefill_scale.on=rate fleet.prefill_scale.target=2 fleet.prefill_scale.every_s=1 fleet.prefill_scale.warm_up_s=0.5 fleet.prefill_scale.down_s=0" on a tiny model
      Then all 12 requests were completed
      And its scaling.parquet says "1.0 start 1"
      And its metrics have 1 as "fleet/started"

  Rule: What cannot work is refused before the run

    @R28.6
    Scenario Outline: <settings> is refused
      When I run "executor=simulated hardware=h100_sxm kv.memory=1MiB <settings>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"
      And nothing is said of "KV cache: "

      Examples:
        | settings                                               | message                                                                                       |
        | fleet.replicas=0                                       | fleet.replicas=0: must be a number, at least 1                                                 |
        | fleet.replicas=2 fleet.router=best                     | fleet.router=best: unknown; known: cache_aware ... a name of your own needs plugins            |
        | fleet.replicas=2 fleet.prefill=2                       | fleet.prefill=2: leaves none of fleet.replicas=2 to decode; take fewer                         |
        | fleet.replicas=2 fleet.prefill=1 kv.prefix_sharing=false | fleet.prefill=1: needs a prefix cache; use kv=paged                                          |
        | fleet.replicas=2 fleet.prefill=1 fleet.link.gb_s=0     | fleet.link.gb_s=0.0: must be more than 0: nothing would ever arrive                            |
        | fleet.replicas=2 fleet.router=precise kv=contiguous    | fleet.router=precise: needs a prefix cache, and the replicas have none; use kv=paged           |
        | fleet.replicas=2 fleet.router=cache_aware kv.prefix_sharing=false | fleet.router=cache_aware: needs a prefix cache ... kv.prefix_sharing=true, or a router that knows no prefixes |
        | fleet.replicas=2 fleet.router=sticky fleet.prefixes=memory kv=contiguous | fleet.prefixes=memory: needs a prefix cache                                  |
        | fleet.replicas=2 fleet.prefill=1 fleet.handshake=first | fleet.handshake=first: unknown; known: prefill_first, decode_first                             |
        | fleet.replicas=2 fleet.prefill=1 fleet.link.send=token | fleet.link.send=token: unknown; known: prompt, chunk, layer                                    |
        | fleet.replicas=2 fleet.prefill=1 fleet.link.send=layer | fleet.link.send=layer: sends to blocks that are reserved before the prefill; use fleet.handshake=decode_first |
        | fleet.replicas=2 fleet.life=[1:die:2]                | fleet.life=1:die:2: write seconds, one of die, drain, return, and a replica from 0 to 1, as 'fleet.life=[10:die:1]' |
        | fleet.replicas=2 fleet.life=[1:die:0,2:die:1]       | fleet.life=2:die:1: leaves no replica for requests that arrive after 2 s                       |
        | fleet.replicas=3 fleet.store=1                         | fleet.store=1: holds no block; give it more                                                    |
        | fleet.replicas=3 fleet.store=1GiB kv.prefix_sharing=false | fleet.store=1GiB: needs a prefix cache; use kv=paged                                        |
        | fleet.replicas=3 fleet.store=1GiB fleet.store_weight=2 | fleet.store_weight=2.0: must be in [0, 1]                                                    |
        | fleet.replicas=3 fleet.neighbours=true kv.prefix_sharing=false | fleet.neighbours=true: needs a prefix cache; use kv=paged                              |
        | fleet.replicas=3 fleet.neighbours=true fleet.pull=never | fleet.pull=never: unknown; known: auto, always, cheaper                                       |
        | fleet.replicas=3 fleet.scale.on=kv                     | fleet.scale.target=null: needs a value of kv for each replica, as fleet.scale.target=0.8 |
        | fleet.replicas=3 fleet.scale.on=queue                  | fleet.scale.target=null: needs a value of queue for each replica, as fleet.scale.target=4 |
        | fleet.replicas=3 fleet.scale.on=kv fleet.scale.target=1 fleet.scale.least=4 | fleet.scale.least=4: is more than fleet.replicas=3, the most |
        | fleet.replicas=3 fleet.scale.on=kv fleet.scale.target=80 | fleet.scale.target=80.0: is a share of the blocks, at most 1, as 0.8 |
        | fleet.replicas=3 fleet.scale.on=load                   | fleet.scale.on=load: unknown; known: queue, kv, rate                                          |
        | fleet.replicas=3 fleet.scale.on=kv fleet.scale.target=1 fleet.life=[1:die:1] | fleet.life=1:die:1: is of replica 1, and whether it serves a rule decides; leave it out |
        | fleet.replicas=3 fleet.prefill=1 fleet.prefill_scale.on=kv fleet.prefill_scale.target=1 fleet.prefill_scale.least=2 | fleet.prefill_scale.least=2: is more than fleet.prefill=1, the most; take fewer |
        | fleet.replicas=3 fleet.scale.on=kv fleet.scale.target=1 fleet.scale.least=3 fleet.prefill=1 | fleet.scale.least=3: is more than fleet.replicas=3 less fleet.prefill=1, the most |
        | fleet.replicas=3 fleet.prefill=1 fleet.life=[1:die:0] | fleet.life=1:die:0: leaves no replica that prefills for requests that arrive after 1 s      |
        | fleet.replicas=3 fleet.prefill=2 fleet.life=[1:die:2] | fleet.life=1:die:2: leaves no replica that decodes for requests that arrive after 1 s       |
