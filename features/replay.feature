Feature: Which eviction policy would keep most, and what is the most that any could
  Before a pool is sized or a policy chosen, the prompts of a workload are replayed through the ledger alone. Beside
  the policies stands the optimum, which knows the future.

  Rule: The table has every policy, the optimum and the ceiling

    @R7.6
    Scenario: Conversations, under all policies
      When I replay "workload=multi_turn"
      Then the command succeeds
      And the hit rates of cost, fifo, lfu, lru, s3_fifo, sieve and belady are in the table, at 6 pool sizes
      And belady finds at least what each policy finds, and at most the ceiling
      And in the largest pool all find as much as in one that is never full
      And a picture of them was written

    @R7.6
    Scenario: Two policies, at sizes of my own
      When I replay "workload=multi_turn kv.eviction=lru,lfu kv.num_blocks=160,240 concurrency=4"
      Then the command succeeds
      And the hit rates of lru, lfu and belady are in the table, at 2 pool sizes
      And belady finds at least what each policy finds, and at most the ceiling

    @R29.31
    Scenario: Text, and a model that has no tokenizer here
      When I replay "workload=chat kv.eviction=lru kv.num_blocks=20"
      Then the command succeeds
      And the message says "prompts have the lengths that kvlab's own tokenizer gives them"

    # Four prompts take turns and three fit: the least recently used is always the one that comes next.

    @R7.6
    Scenario: Where the least recently used block is the next to be used
      Given a file of JSON lines with 40 requests that repeat 4 prompts of 16 tokens
      When I replay that file with "kv.eviction=lru kv.num_blocks=3"
      Then lru finds 0 % of the prompt tokens and belady 60 %, of 90 % in a pool that is never full

    # Between two uses of a prompt's block come those of the three others.

    @R27.11
    Scenario: How far apart the uses of a block are
      Given a file of JSON lines with 40 requests that repeat 4 prompts of 16 tokens
      When I replay that file with "kv.eviction=lru kv.num_blocks=3"
      Then 4 blocks are new, and 36 need a pool of 4 blocks
      And a picture of them was written

  Rule: What cannot be replayed is refused in a sentence

    @R7.6
    Scenario Outline: The replay refuses <arguments>
      When I replay "workload=multi_turn <arguments>"
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | arguments           | message                                                                               |
        | kv.eviction=belady  | kv.eviction=belady: knows the future and is in every replay; name policies of a run   |
        | kv.eviction=sive    | kv.eviction=sive: unknown; known: cost, fifo, lfu, lru, s3_fifo, sieve; ... sieve?     |
        | kv.num_blocks=3     | kv.num_blocks=3: the workload's longest request takes 39 blocks of 16 tokens; ... =39 |
        | kv=contiguous       | kv.backend=contiguous: keeps no prefixes that could be evicted; take kv=paged         |
        | kv=paged_unshared   | kv.prefix_sharing=False: keeps no prefixes that could be evicted; take kv=paged       |
        | concurrency=0       | concurrency=0: must be a number, at least 1                                           |
        | kv.memory=1GiB      | kv.memory=1GiB: a replay takes sizes in blocks: kv.num_blocks=1000,10000              |
        | kv.quota=0.5        | kv.quota=0.5: a replay compares eviction policies alone, without time, tenants and    |
        | figure=curves.txt   | figure=curves.txt: a picture's name ends in .png, .svg, .pdf                          |
        | workload=azure workload.path=trace.csv | workload=azure: what would be found again is unknown: workload=azure has the lengths of prompts, and not what they begin with |
        | workload=no_such    | workload=no_such: unknown; known: azure, burst16                                      |
        | kv.block_size=8,16  | kv.block_size=8,16: a replay does not sweep: give one value                           |
