Feature: A block table says where each token is
  Token p of a sequence is in entry p / block_size of its table, at offset p % block_size of that block.

  Rule: A block that is taken is mapped from the token range it holds

    @R3.1
    Scenario Outline: The block that holds token <first> is mapped when that token comes
      Given a pool of 8 blocks of <block_size> tokens
      And a sequence "alice" of <first> tokens
      Then position <first> of "alice" is mapped to no block
      When "alice" grows by 1 token
      Then positions <first> to <last> of "alice" are mapped to the block it got
      And position <beyond> of "alice" is mapped to no block

      Examples:
        | block_size | first | last | beyond |
        | 16         | 16    | 31   | 32     |
        | 16         | 64    | 79   | 80     |
        | 1          | 3     | 3    | 4      |
        | 32         | 32    | 63   | 64     |

    @R3.1
    Scenario: A prompt's ranges are mapped at once
      Given a pool of 8 blocks of 16 tokens
      And the free blocks are in shuffled order
      When "alice" is prefilled with 40 tokens at once
      Then the table of "alice" is
        | entry | from | to |
        | 0     | 0    | 15 |
        | 1     | 16   | 31 |
        | 2     | 32   | 47 |
      And position 48 of "alice" is mapped to no block
      And the step before wrote and read by that same table

    @R3.1
    Scenario: A sequence that ends is mapped nowhere
      Given a pool of 8 blocks of 16 tokens
      And a sequence "alice" of 40 tokens
      When "alice" ends
      Then no position of "alice" can be looked up, and its slot cannot be given back again

  Rule: A token's position resolves to the block and offset that hold its K and V

    @R3.2
    Scenario Outline: Position <position> of 100, in blocks of <block_size>
      Given a pool of <pool> blocks of <block_size> tokens
      And the free blocks are in shuffled order
      And a sequence "alice" of 60 tokens
      And a sequence "bob" of 20 tokens
      And "alice" grows by 40 tokens
      Then position <position> of "alice" is in its block <entry> at offset <offset>
      And that place holds K and V of token <position> of "alice" in every layer

      Examples:
        | block_size | pool | position | entry | offset |
        | 16         | 16   | 0        | 0     | 0      |
        | 16         | 16   | 15       | 0     | 15     |
        | 16         | 16   | 16       | 1     | 0      |
        | 16         | 16   | 37       | 2     | 5      |
        | 16         | 16   | 63       | 3     | 15     |
        | 16         | 16   | 64       | 4     | 0      |
        | 16         | 16   | 99       | 6     | 3      |
        | 1          | 128  | 99       | 99    | 0      |
        | 8          | 20   | 99       | 12    | 3      |
        | 256        | 3    | 99       | 0     | 99     |

    @R3.2
    Scenario Outline: Position <position> of a sequence with 7 blocks is refused
      Given a pool of 16 blocks of 16 tokens
      And a sequence "alice" of 100 tokens
      Then position <position> of "alice" is mapped to no block

      Examples:
        | position |
        | -1       |
        | 112      |
        | 100000   |

  Rule: Growth appends to the table

    @R3.3
    Scenario Outline: Two sequences grow in turns by <tokens> tokens
      Given a pool of 32 blocks of <block_size> tokens
      And a sequence "alice" of 40 tokens
      And a sequence "bob" of 20 tokens
      When "alice" and "bob" grow by <tokens> tokens in turns, 5 times
      Then each time, the old entries of their tables stayed as they were
      And each time, K and V of their old tokens stayed as they were, bit for bit
      And the blocks of "alice" are not side by side

      Examples:
        | block_size | tokens |
        | 16         | 16     |
        | 16         | 7      |
        | 16         | 33     |
        | 8          | 8      |

  Rule: The order of the blocks in the pool does not matter

    @R3.4 @every_backend
    Scenario Outline: 100 tokens in blocks <order>
      Given a pool of 16 blocks of 16 tokens
      And the 7 blocks that come next are <order>
      When "alice" is prefilled with 90 tokens at once
      Then the blocks of "alice" are <order>
      When "alice" attends with 9 new tokens
      Then each sequence gets what plain attention gives
      And "alice" gets the same from a pool whose blocks are in order
      When "alice" attends with 1 new token
      Then each sequence gets what plain attention gives
      And "alice" gets the same from a pool whose blocks are in order

      Examples:
        | order              |
        | 0 1 2 3 4 5 6      |
        | 6 5 4 3 2 1 0      |
        | 15 0 14 1 13 2 12  |
        | 9 3 12 0 7 15 5    |
