Feature: One pool of KV memory
  The server reserves its KV memory once, when it starts, and serves every sequence from it.

  Rule: The whole pool is reserved at start, and nothing later

    # A token of this model takes 512 bytes of K and V: a block of 16 tokens 8192, a slot of 64 tokens 32768.

    @R2.1
    Scenario Outline: <setting> gives <blocks> blocks of <tokens> tokens
      Given a server configured with <setting>
      And sequences of up to 64 tokens
      When the server starts
      Then its pool has <blocks> blocks of <tokens> tokens
      And K and V take <bytes> bytes

      Examples: Blocks counted
        | setting                                | blocks | tokens | bytes  |
        | kv.num_blocks=12                       | 12     | 16     | 98304  |
        | kv.num_blocks=12, kv.block_size=8      | 12     | 8      | 49152  |
        | kv.num_blocks=12, kv.backend=contiguous | 3     | 64     | 98304  |
        | kv.num_blocks=15, kv.backend=contiguous | 3     | 64     | 98304  |

      Examples: A byte budget, rounded down to whole blocks
        | setting                                | blocks | tokens | bytes  |
        | kv.memory=64KiB                        | 8      | 16     | 65536  |
        | kv.memory=65535                        | 7      | 16     | 57344  |
        | kv.memory=100KB                        | 12     | 16     | 98304  |
        | kv.memory=100KB, kv.block_size=32      | 6      | 32     | 98304  |
        | kv.memory=100KB, kv.backend=contiguous | 3      | 64     | 98304  |

    @R2.1
    Scenario: All the memory is there from the start
      Given a pool of 12 blocks of 16 tokens
      When "alice" is prefilled with 192 tokens at once
      Then 0 blocks are free
      And every token of "alice" reads back as it was written

    @R2.1
    Scenario: 128 MiB are taken from the machine at start, and no more when they fill up
      When a pool of 16384 blocks of 16 tokens is reserved and then filled
      Then the process took 128 MiB for the empty pool
      And it took no more while the pool was filled

    @R2.1
    Scenario Outline: Serving from <memory> allocates no tensor for K and V
      Given a pool of <memory>
      When 50 sequences come, grow and go
      Then K and V are where they were at start
      And no step allocated memory for K and V

      Examples:
        | memory                           |
        | 12 blocks of 16 tokens           |
        | 4 contiguous slots of 64 tokens  |

    @R2.1
    Scenario Outline: A server with <memory> serves 12 requests from the memory it started with
      Given the model "qwen3"
      And a server with <memory>
      When 12 requests of 20 prompt tokens and 8 output tokens are served
      Then K and V are where they were at start
      And every request got its 8 tokens

      Examples:
        | memory                          |
        | 8 blocks of 16 tokens           |
        | 2 contiguous slots of 64 tokens |

  Rule: A new sequence is served from free blocks

    @R2.2
    Scenario Outline: A third sequence comes into a pool of <memory>
      Given a pool of <memory>
      And a sequence "alice" of 33 tokens
      And a sequence "bob" of 20 tokens
      When a sequence "carol" of 40 tokens arrives
      Then "carol" gets <taken> more blocks, out of those that were free
      And <free> blocks are free
      And no block is held by two of them
      And every token of "alice", "bob" and "carol" reads back as it was written

      Examples:
        | memory                          | taken | free |
        | 8 blocks of 16 tokens           | 3     | 0    |
        | 10 blocks of 16 tokens          | 3     | 2    |
        | 3 contiguous slots of 64 tokens | 1     | 0    |

    @R2.2
    Scenario: A sequence that needs more blocks than are free gets none of them
      Given a pool of 8 blocks of 16 tokens
      And a sequence "alice" of 70 tokens
      When a sequence "bob" of 49 tokens tries to enter
      Then it is refused: 4 blocks wanted, 3 free, 8 in the pool
      And 3 blocks are free
      And every token of "alice" reads back as it was written

  Rule: A sequence that leaves gives back every block, for reuse in the same step

    @R2.3
    Scenario Outline: A sequence of <tokens> tokens leaves <memory>
      Given a pool of <memory>
      And a sequence "alice" of 20 tokens
      And a sequence "bob" of <tokens> tokens
      When "bob" ends
      Then the blocks of "bob" are free again
      When a sequence "carol" of <tokens> tokens arrives
      Then "carol" gets the blocks that "bob" gave back
      And every token of "alice" and "carol" reads back as it was written

      Examples:
        | memory                          | tokens |
        | 8 blocks of 16 tokens           | 96     |
        | 8 blocks of 16 tokens           | 81     |
        | 3 blocks of 16 tokens           | 1      |
        | 2 contiguous slots of 64 tokens | 33     |

    @R2.3
    Scenario Outline: A waiting request runs in the step that the other's blocks come back in, as that one <ends>
      Given the model "qwen3"
      And a server with <memory>
      And a request "alice" of 40 prompt tokens and 8 output tokens
      And a request "bob" of 60 prompt tokens and 4 output tokens
      When the server steps until "alice" <ends>
      Then "bob" is waiting
      When the server steps once
      Then "bob" runs in blocks that "alice" held
      And that step freed <alice> blocks and allocated <bob>
      When the server steps until it has no work
      Then every block is free
      And "bob" got what transformers generates, token for token

      Examples:
        | ends                      | memory                         | alice | bob |
        | is complete               | 4 blocks of 16 tokens          | 3     | 4   |
        | is aborted after 3 tokens | 4 blocks of 16 tokens          | 3     | 4   |
        | is complete               | 1 contiguous slot of 64 tokens | 1     | 1   |
        | is aborted after 3 tokens | 1 contiguous slot of 64 tokens | 1     | 1   |

    @R2.3
    Scenario Outline: A callback aborts <whose> request at token 3 of <tokens>, while the engine hands that token out
      Given the model "qwen3"
      And a server with 8 blocks of 16 tokens
      And a request "alice" of 20 prompt tokens and <tokens> output tokens, whose callback aborts "<aborted>" at token 3
      And a request "bob" of 20 prompt tokens and <tokens> output tokens
      When the server steps until it has no work
      Then every block is free
      And "alice" and "bob" each ended once
      When 1 request of 20 prompt tokens and 8 output tokens is served
      Then "request-0" got what transformers generates, token for token

      Examples:
        | whose         | aborted | tokens |
        | its own       | alice   | 8      |
        | its own       | alice   | 3      |
        | the other's   | bob     | 8      |
        | the other's   | bob     | 3      |

    @R2.3
    Scenario: The blocks of an evicted sequence serve the one that needed them in that very step
      Given the model "qwen3"
      And no admission reserve
      And a server with 4 blocks of 16 tokens
      And a request "alice" of 30 prompt tokens and 20 output tokens
      And a request "bob" of 30 prompt tokens and 20 output tokens
      When the server steps until "bob" is evicted
      Then "alice" runs in a block that "bob" held
      And that step freed 2 blocks and allocated 1
      When the server steps until it has no work
      Then every block is free
      And every answer is what transformers generates, token for token

  Rule: Where no block is free of content, cached content makes room

    @R2.4
    Scenario Outline: A text of <tokens> tokens comes into 4 blocks of which <cached> are cached
      Given a pool of 4 blocks of 16 tokens that shares prefixes and evicts by <policy>
      And a text "old" of <old> tokens was stored and freed
      When a text "new" of <tokens> tokens arrives
      Then "new" holds <blocks> blocks
      And every token of "new" reads back as it was written
      And <evicted> blocks were evicted
      And the first <left> blocks of "old" are cached, and no more

      Examples:
        | policy | old | cached | tokens | blocks | evicted | left |
        | lru    | 64  | 4      | 1      | 1      | 1       | 3    |
        | lru    | 48  | 3      | 16     | 1      | 0       | 3    |
        | lru    | 48  | 3      | 17     | 2      | 1       | 2    |
        | lru    | 64  | 4      | 64     | 4      | 4       | 0    |
        | lfu    | 48  | 3      | 33     | 3      | 2       | 1    |
        | fifo   | 32  | 2      | 64     | 4      | 2       | 0    |

    @R2.4
    Scenario: A sequence that grows by a token evicts a block for it
      Given a pool of 3 blocks of 16 tokens that shares prefixes
      And a text "old" of 32 tokens was stored and freed
      And a text "alice" of 16 tokens
      When "alice" grows by 1 token
      Then "alice" gets 1 more block, out of those that were free
      And 1 block was evicted
      And the first 1 blocks of "old" are cached, and no more
      And every token of "alice" reads back as it was written

    @R2.4
    Scenario: With neither a free block nor a cached one, it is refused
      Given a pool of 3 blocks of 16 tokens that shares prefixes
      And a text "alice" of 40 tokens
      When a text "bob" of 1 token tries to enter
      Then it is refused: 1 block wanted, 0 free, 3 in the pool
      And nothing has changed

    @R2.4
    Scenario: A server that has cached its whole pool serves the next request from it
      Given the model "qwen3"
      And a server with 8 blocks of 16 tokens that shares prefixes
      When 6 requests of 48 prompt tokens and 24 output tokens are served
      Then more than 8 blocks were evicted
      And every answer is what transformers generates, token for token
      And every block is free

  Rule: Without a size, the pool takes the bytes of contiguous slots

    @R2.5
    Scenario Outline: <batch> sequences of up to <longest> tokens with kv.backend=<backend>
      Given a server configured with kv.backend=<backend>
      And sequences of up to <longest> tokens
      And batches of up to <batch> sequences
      When the server starts
      Then its pool has <blocks> blocks of <tokens> tokens
      And K and V take <bytes> bytes

      Examples:
        | backend    | batch | longest | blocks | tokens | bytes  |
        | contiguous | 4     | 64      | 4      | 64     | 131072 |
        | paged      | 4     | 64      | 16     | 16     | 131072 |
        | contiguous | 4     | 100     | 4      | 100    | 204800 |
        | paged      | 4     | 100     | 25     | 16     | 204800 |
        | paged      | 3     | 100     | 18     | 16     | 147456 |

    @R2.5
    Scenario: A size that is given wins
      Given a server configured with kv.num_blocks=8
      And sequences of up to 64 tokens
      And batches of up to 4 sequences
      When the server starts
      Then its pool has 8 blocks of 16 tokens

  Rule: A pool that cannot work is refused at start, with a message that says what would fit

    @R2.6
    Scenario Outline: <setting> for a request of <tokens> tokens
      Given a server configured with <setting>
      And sequences of up to 64 tokens
      And a workload with a request of <tokens> tokens
      When the server starts
      Then it refuses, saying "<reason>"
      And it suggests "<suggestion>"
      When the server starts with <suggestion> instead
      Then it serves the workload

      Examples:
        | setting                               | tokens | reason                                         | suggestion       |
        | kv.num_blocks=2                       | 64     | too small for one sequence of 64 tokens        | kv.num_blocks=4  |
        | kv.num_blocks=2                       | 33     | too small for one sequence of 33 tokens        | kv.num_blocks=3  |
        | kv.num_blocks=2                       | 33     | too small for one sequence of 33 tokens        | kv.memory=24KiB  |
        | kv.memory=20KiB                       | 50     | too small for one sequence of 50 tokens        | kv.memory=32KiB  |
        | kv.memory=4000                        | 10     | less than one block of 16                      | kv.memory=32KiB  |
        | kv.memory=20KiB, kv.backend=contiguous | 10    | less than one slot of 64                       | kv.memory=32KiB  |

    @R2.6
    Scenario: No blocks at all
      Given a server configured with kv.num_blocks=0
      When the server starts
      Then it refuses, saying "kv.num_blocks=0: must be a number, at least 1"

    @R2.6
    Scenario: One block less than suggested is still refused
      Given a server configured with kv.num_blocks=3
      And sequences of up to 64 tokens
      And a workload with a request of 49 tokens
      When the server starts
      Then it refuses, saying "too small for one sequence of 49 tokens"
      And it suggests "kv.num_blocks=4"

    @R2.6
    Scenario Outline: A pool larger than the machine's memory
      Given a server configured with kv.backend=<backend>, kv.memory=900000GiB
      And sequences of up to 64 tokens
      When the server starts
      Then it refuses, saying "available"
      And it suggests an amount of memory that the machine has

      Examples:
        | backend    |
        | paged      |
        | contiguous |

    @R2.6
    Scenario: Tensors that the machine cannot give
      When a pool of 1000000000000 blocks of 16 tokens is reserved
      Then it refuses, saying "does not fit on cpu"

    @R2.6
    Scenario: A pool without blocks
      When a pool of 0 blocks of 16 tokens for sequences of 64 tokens is reserved
      Then it refuses, saying "one of 64 tokens needs 4 blocks of 16 tokens"
