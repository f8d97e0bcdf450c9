Feature: A disk behind host memory, links that take their time, and swapping
  What leaves host memory goes to a directory that the next run of the same model finds. On a simulated device copies
  take the time of its links. A sequence that is preempted may leave its blocks there until it returns.

  Rule: What is on a disk outlives the run, and belongs to one model

    @R20.5
    Scenario: The next run finds what one has left
      Given an engine whose blocks go to a directory
      When it answers 3 prompts that its pool has room for one of
      And an engine of the next process answers the same
      Then both gave the same answers
      And the next found 96 tokens of the first prompt

    @R20.5
    Scenario: Damaged files are computed again
      Given an engine whose blocks go to a directory
      When it answers 3 prompts that its pool has room for one of
      And a byte of each file is changed
      And an engine of the next process answers the same
      Then both gave the same answers
      And the next found 0 tokens of the first prompt
      And the damage was told once

    @R20.5
    Scenario: A disk that is full takes no more, and loses nothing
      Given an engine whose blocks go to a directory
      And the disk is full
      When it answers 3 prompts that its pool has room for one of
      And it answers them again
      Then both gave the same answers
      And it was told once that no more blocks are written

    @R20.5
    Scenario Outline: <what> is refused
      Given an engine whose blocks go to a directory
      When an engine with <settings> opens it
      Then that is refused, saying "<sentence>"

      Examples:
        | what                        | settings                 | sentence                                                                                                                                                      |
        | a directory of other bits   | kv.dtype=int8            | holds blocks of model=qwen3_tiny, kv.dtype=float32, and this engine has model=qwen3_tiny, kv.dtype=int8; name another directory, or delete this one           |
        | a directory in use          | while the first runs     | another engine uses it; give each its own directory                                                                                                           |
        | more than the disk has      | kv.offload_disk=900TiB   | kv.offload_disk=900TiB: is more than there is on the disk of kv.offload_dir=DIR                                                                               |
        | a disk without a directory  | kv.offload_dir=null      | kv.offload_disk=16MiB: needs a directory for the blocks, as kv.offload_dir=/data/kv                                                                           |

  Rule: On a simulated device copies take the time of its links

    @R20.6
    Scenario Outline: A prompt of 8,192 tokens in host memory, over a link of <link> GB/s
      When Llama 3.1 8B on an H100 loads it over hardware.host_link_gb_s=<link>
      Then its first token comes <sooner> than if it is computed
      And it waits <ms> ms for the 510 of its 512 blocks that had left the pool

      Examples:
        | link | sooner | ms     |
        | 64   | sooner | 19.7   |
        | 4    | later  | 314.6  |

  Rule: A preempted sequence may leave its blocks in host memory

    @R20.7
    Scenario Outline: Six sequences in a pool that they outgrow, with scheduler.preemption.mode=<mode>
      Given a pool of 24 blocks of 4 tokens, with host memory for <room> more
      When 6 sequences outgrow it with scheduler.preemption.mode=<mode>
      Then each is answered as if it were alone
      And tokens are computed again: <again>

      Examples:
        | mode      | room | again |
        | recompute | 1    | yes   |
        | swap      | 64   | no    |
        | swap      | 3    | yes   |
