Feature: What leaves the pool for host memory comes back
  With kv.offload the content of evicted blocks is copied to main memory. A prompt that begins with it is given blocks
  for it; its sequence waits until they are copied back, and others run meanwhile.

  Rule: The answer is that of a pool that evicts nothing

    @R20.1
    Scenario Outline: A prompt of 40 tokens comes again after <others>, with room for <room> blocks in host memory
      Given a pool of 12 blocks of 4 tokens, with host memory for <room> more
      When a prompt "a" of 40 tokens is answered with 8 tokens
      And <others> prompts of 40 tokens are answered with 8 tokens
      And the prompt "a" is asked again
      Then both answers to "a" are those of the model without a cache
      And <cached> of its tokens were not computed
      And <found> tokens were found in host memory

      Examples:
        | others | room | cached | found |
        | 1      | 64   | 39     | 40    |
        | 3      | 64   | 39     | 40    |
        | 3      | 4    | 0      | 0     |

    @R20.1
    Scenario: Others run while a sequence waits for its content
      Given a pool of 24 blocks of 4 tokens, with slow memory behind it
      When a prompt "a" of 40 tokens is answered with 8 tokens
      And 2 prompts of 80 tokens are answered with 8 tokens
      And the slow memory stops
      And the prompt "a" is asked again 3 times beside another
      Then the other is answered while those 3 are being loaded
      And once the slow memory goes on both answers to "a" are those of the model without a cache
      And its 10 blocks were loaded once for all 3

  Rule: Memory that loses content costs time and nothing else

    @R20.2
    Scenario: A block that cannot be read is computed
      Given a pool of 24 blocks of 4 tokens, with slow memory behind it
      When a prompt "a" of 40 tokens is answered with 8 tokens
      And 2 prompts of 80 tokens are answered with 8 tokens
      And the slow memory loses the block of tokens 20 to 23 of "a"
      And the prompt "a" is asked again
      Then both answers to "a" are those of the model without a cache
      And 20 of its tokens were not computed
      And 1 block was lost

  Rule: A run says what went to host memory and came back

    @R20.3 @tracked
    Scenario: The figures are in the table, in the tracking store and in the steps
      When I run "kv.block_size=4 kv.num_blocks=20 kv.offload=1MiB workload.num_requests=8 workload.group_len=16" on a tiny model
      Then the command succeeds
      And the message says "tokens, ... more in host memory; "
      And the message says "tokens found in host memory"
      And it has the metrics
        | metric                 |
        | kv/host_blocks_peak    |
        | kv/host_stored_blocks  |
        | kv/host_loaded_blocks  |
        | kv/host_hit_tokens     |
        | kv/store_s             |
        | kv/load_s              |
      And they equal those of summary.json

  Rule: Where it cannot be done it is refused

    @R20.4
    Scenario Outline: <what> is refused
      When I run "<settings>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | what                        | settings                                | message                                                                                              |
        | more than the machine has   | kv.offload=900TiB                       | kv.offload=900TiB: beside the run's weights, cache and steps main memory has ... available; kv.offload= ... MiB would fit |
        | less than a block           | kv.offload=1KiB                         | kv.offload=1KiB: holds no block: 16 tokens take 16.0 KiB; 16KiB would hold one                       |
        | no memory                   | kv.offload=0MiB                         | kv.offload=0MiB: must be more than 0 bytes, or null                                                  |
        | no size                     | kv.offload=lots                         | kv.offload=lots:                                                                                     |
        | memory without a cache      | kv.offload=1MiB kv.prefix_sharing=false | kv.offload=1MiB: is for cached blocks, and kv.prefix_sharing=false keeps none; set it to true        |
        | a pool that keeps no blocks | kv.offload=1MiB kv=contiguous           | kv.offload=1MiB: is for cached blocks, and kv.backend=contiguous keeps none; use kv=paged            |
        | what expires                | kv.offload=1MiB kv.ttl_s=60             | kv.offload=1MiB: keeps what the pool evicts, whatever kv.ttl_s=60.0 says; leave one of them null     |
        | an eviction of another name | kv.offload_eviction=mru                 | kv.offload_eviction=mru: unknown; known: cost, fifo, lfu, lru, s3_fifo, sieve; did you mean lru?      |
