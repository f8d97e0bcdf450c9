Feature: Kernels compute what their readable references compute
  On a GPU the kernels are compiled; elsewhere the same code runs interpreted.

  Rule: The paged decode kernel agrees with plain attention over gathered K and V

    @R12.1
    Scenario Outline: <heads> query heads on <kv_heads> KV heads of <dim> numbers, in blocks of <block> tokens
      Given a pool of <blocks> blocks of <block> tokens for <heads> query heads and <kv_heads> KV heads of <dim> numbers
      And the free blocks are in shuffled order
      And one sequence for each of the lengths <lengths>
      And every token slot without a token holds garbage
      When the decode kernel computes one query of each sequence
      Then each query gets what plain attention over the gathered K and V gives
      And the kernel has not changed a bit of K and V

      Examples: group sizes 1, 4 and all
        | heads | kv_heads | dim | block | blocks | lengths                |
        | 2     | 2        | 64  | 16    | 20     | 0, 1, 15, 16, 17, 100  |
        | 8     | 2        | 64  | 16    | 20     | 0, 1, 15, 16, 17, 100  |
        | 8     | 1        | 64  | 16    | 20     | 0, 1, 15, 16, 17, 100  |

      Examples: head sizes
        | heads | kv_heads | dim | block | blocks | lengths                |
        | 8     | 2        | 80  | 16    | 20     | 0, 1, 15, 16, 17, 100  |
        | 8     | 2        | 128 | 16    | 20     | 0, 1, 15, 16, 17, 100  |
        | 8     | 2        | 256 | 16    | 20     | 0, 1, 15, 16, 17, 100  |

      Examples: block sizes
        | heads | kv_heads | dim | block | blocks | lengths                |
        | 8     | 2        | 64  | 1     | 80     | 0, 1, 2, 70            |
        | 8     | 2        | 64  | 24    | 20     | 0, 1, 23, 24, 25, 100  |
        | 8     | 2        | 64  | 32    | 20     | 0, 1, 31, 32, 33, 100  |

    @R12.1
    Scenario Outline: A sequence shared out among programs of <split> tokens
      Given a pool of 20 blocks of 16 tokens for 8 query heads and 2 KV heads of 64 numbers
      And the free blocks are in shuffled order
      And one sequence for each of the lengths 0, 1, 31, 32, 33, 100
      And every token slot without a token holds garbage
      When the decode kernel computes one query of each sequence, <split> tokens to a program
      Then each query gets what plain attention over the gathered K and V gives
      And the kernel has not changed a bit of K and V

      Examples:
        | split |
        | 16    |
        | 33    |
        | 1000  |

  Rule: The rotary kernel agrees with the reference

    @R12.2
    Scenario Outline: One angle table for all sequences, heads of <dim> numbers
      Given a token at each of the positions 0, 63, 7, 7, 30, with <heads> query heads and 2 KV heads of <dim> numbers
      And one angle table for all sequences
      When the rotary kernel turns q and k
      Then q and k are turned as the reference turns them

      Examples:
        | dim | heads |
        | 64  | 2     |
        | 80  | 6     |
        | 128 | 8     |
        | 256 | 2     |

    @R12.2
    Scenario Outline: An angle table of its own for each sequence, heads of <dim> numbers
      Given a token at each of the positions 0, 63, 7, 7, 30, with <heads> query heads and 2 KV heads of <dim> numbers
      And an angle table of another base for each sequence
      When the rotary kernel turns q and k
      Then q and k are turned as the reference turns them
      And two tokens at the same position are turned by different angles

      Examples:
        | dim | heads |
        | 64  | 2     |
        | 80  | 6     |
        | 128 | 8     |
        | 256 | 2     |
