Feature: Sequences share the memory of what they have in common
  A full block is found by its tokens and all tokens before them, so that it is computed and stored once.

  Rule: Sequences that begin alike have the same blocks, and the later one computes only the rest

    @R4.1
    Scenario Outline: <tokens> tokens of which the first <same> are known, in blocks of <block_size>
      Given a pool of <pool> blocks of <block_size> tokens that shares prefixes
      And a text "alice" of 70 tokens
      When a text "bob" of <tokens> tokens arrives whose first <same> are those of "alice"
      Then "bob" shares <shared> blocks with "alice"
      And "bob" found <found> of its tokens in the cache and computed <rest>
      And <used> blocks are in use
      And every token of "alice" and "bob" reads back as it was written

      Examples:
        | block_size | pool | tokens | same | shared | found | rest | used |
        | 16         | 16   | 80     | 0    | 0      | 0     | 80   | 10   |
        | 16         | 16   | 80     | 15   | 0      | 0     | 80   | 10   |
        | 16         | 16   | 80     | 16   | 1      | 16    | 64   | 9    |
        | 16         | 16   | 80     | 17   | 1      | 16    | 64   | 9    |
        | 16         | 16   | 80     | 33   | 2      | 32    | 48   | 8    |
        | 16         | 16   | 50     | 48   | 3      | 48    | 2    | 6    |
        | 16         | 16   | 80     | 70   | 4      | 64    | 16   | 6    |
        | 16         | 16   | 70     | 70   | 4      | 64    | 6    | 6    |
        | 1          | 160  | 80     | 33   | 33     | 33    | 47   | 117  |
        | 8          | 32   | 80     | 33   | 4      | 32    | 48   | 15   |
        | 64         | 4    | 80     | 70   | 1      | 64    | 16   | 3    |

    @R4.1
    Scenario: A prompt is found again after the sequence that computed it has ended
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "alice" of 70 tokens was stored and freed
      When a text "bob" of 60 tokens arrives whose first 50 are those of "alice"
      Then "bob" found 48 of its tokens in the cache and computed 12
      And 4 blocks are in use
      And every token of "bob" reads back as it was written

    @R4.1
    Scenario: The answers of a conversation are found with its next turn
      Given a pool of 16 blocks of 16 tokens that shares prefixes
      And a text "alice" of 20 tokens
      When "alice" grows token by token to 50 tokens
      And "alice" ends
      And a text "turn2" of 70 tokens arrives whose first 50 are those of "alice"
      Then "turn2" found 48 of its tokens in the cache and computed 22
      And every token of "turn2" reads back as it was written

    @R4.1
    Scenario Outline: The same words behind another beginning of <own> tokens are another text
      Given a pool of 16 blocks of 16 tokens that shares prefixes
      And a text "alice" of 64 tokens
      And a text "zoe" of 40 tokens
      When a text "bob" of 64 tokens arrives that begins as "zoe" for <own>, and then goes on as "alice"
      Then "bob" shares no blocks with "alice"
      And "bob" found <found> of its tokens in the cache and computed <rest>
      When a text "carol" arrives with the tokens of "bob"
      Then "carol" shares 4 blocks with "bob"
      And every token of "alice", "bob" and "carol" reads back as it was written

      Examples:
        | own | found | rest |
        | 1   | 0     | 64   |
        | 16  | 16    | 48   |
        | 32  | 32    | 32   |

    @R4.1
    Scenario: Four users with one system prompt arrive at once
      Given the model "qwen3"
      And steps of up to 256 tokens
      And a server with 32 blocks of 16 tokens that shares prefixes
      And 4 requests of 40 prompt tokens, the first 32 of which are the same, and 8 output tokens
      When the server steps once
      Then that step computed 64 prompt tokens, and found 96 in blocks that it filled itself
      And 6 blocks are in use
      When the server steps until it has no work
      Then every answer is what transformers generates, token for token
      And every block is free

    @R4.1
    Scenario: One user after the other with one system prompt
      Given the model "llama"
      And batches of up to 1 sequences
      And a server with 16 blocks of 16 tokens that shares prefixes
      And 4 requests of 40 prompt tokens, the first 32 of which are the same, and 8 output tokens
      When the server steps until it has no work
      Then the server computed 64 prompt tokens, and found 96 in the cache
      And every answer is what transformers generates, token for token

  Rule: What prompts share may end within a block, as in TensorRT-LLM

    @R4.1
    Scenario Outline: Two prompts of 96 tokens that share 80, framework=<framework> <settings>
      Given a trace
        """
        {"timestamp": 0, "input_length": 96, "output_length": 2, "hash_ids": [0, 1, 2, 3, 4, 5]}
        {"timestamp": 1000, "input_length": 96, "output_length": 2, "hash_ids": [0, 1, 2, 3, 4, 6]}
        """
      When I run "executor=simulated hardware=h100_sxm framework=<framework> kv.block_size=32 kv.num_blocks=8 model.max_seq_len=128 workload=mooncake workload.block_tokens=16 <settings>" on that trace
      Then the command succeeds
      And the requests found 0, <found> tokens of their prompts in the cache

      Examples:
        | framework | settings               | found |
        | trtllm    |                        | 80    |
        | trtllm    | kv.partial_reuse=false | 64    |
        | vllm      |                        | 64    |
        | vllm      | kv.partial_reuse=true  | 80    |

  Rule: A prompt goes on from the last state that is kept of its beginning

    @R29.34
    Scenario Outline: Of the state after 3 blocks the <which> prompt that begins with them finds the first that is kept
      Given a trace
        """
        {"timestamp": 0, "input_length": 5002, "output_length": 2, "hash_ids": [0, 1, 2, 3, 4, 5, 6]}
        {"timestamp": 5000, "input_length": 5002, "output_length": 2, "hash_ids": [0, 1, 2, 7, 8, 9, 10]}
        {"timestamp": 10000, "input_length": 5002, "output_length": 2, "hash_ids": [0, 1, 2, 11, 12, 13, 14]}
        {"timestamp": 15000, "input_length": 5002, "output_length": 2, "hash_ids": [0, 1, 2, 3, 4, 5, 15]}
        """
      When I run "executor=simulated hardware=<device> model=qwen3_5_27b executor.tensor_parallel=2 executor.dtype=bfloat16 executor.weights=fp8 model.max_seq_len=8192 kv.block_size=832 workload=mooncake workload.block_tokens=832 <settings>" on that trace
      Then the command succeeds
      And the requests found 0, <second>, <third>, 4992 tokens of their prompts in the cache

      Examples: where the second prompt leaves the first it is cut; a state is kept at the end of each step, too
        | device   | settings                           | second | third | which |
        | h100_sxm |                                    | 0      | 2496  | third |
        | h100_sxm | framework.version=0.32             | 0      | 2496  | third |
        | h100_sxm | scheduler.max_batched_tokens=2500  | 2496   | 2496  | second |
        | l40s     |                                    | 1664   | 2496  | third |

  Rule: A block is free when its last reference is gone

    @R4.2
    Scenario Outline: <names> hold the same 2 blocks, <how>
      Given a pool of 5 blocks of 16 tokens that shares prefixes
      And a text "alice" of 32 tokens
      And <names> have what "alice" has, <how>
      Then 2 blocks are in use
      When all but 1 of "alice", <names> end
      Then 2 blocks are in use
      When a text "stranger" of 48 tokens arrives
      Then 0 blocks are free
      When a text "late" of 1 token tries to enter
      Then it is refused: 1 block wanted, 0 free, 5 in the pool
      And nothing has changed
      And the one that is left reads back what it wrote
      When the one that is left ends
      Then 2 blocks are free
      When a text "late" of 32 tokens arrives
      Then every token of "late" and "stranger" reads back as it was written

      Examples:
        | names                    | how             |
        | "bob"                    | by their prompt |
        | "bob", "carol"           | by their prompt |
        | "bob", "carol", "dave"   | by their prompt |
        | "bob"                    | as forks        |
        | "bob", "carol"           | as forks        |
        | "bob", "carol", "dave"   | as forks        |

    @R4.2
    Scenario: Of four requests with one prompt, the last to end gives its blocks back
      Given the model "qwen3"
      And steps of up to 256 tokens
      And a server with 32 blocks of 16 tokens that shares prefixes
      And requests with the same 32 prompt tokens and 2, 4, 6 and 8 output tokens
      When the server steps until it has no work
      Then the prompt's 2 blocks were in use in each step until the last had ended
      And every answer is what transformers generates, token for token
      And every block is free

  Rule: A write into a shared block goes to a copy

    @R4.3
    Scenario Outline: <writers> of <forks> and "alice" go on from 20 shared tokens
      Given a pool of 16 blocks of 16 tokens that shares prefixes
      And a text "alice" of 20 tokens
      And <forks> are forked from "alice"
      And what each sequence reads is kept to compare with
      When <writers> grow by <tokens> tokens in the same step
      Then <copies> blocks were copied
      And each sequence reads what was kept, bit for bit, before what is new
      And no block that was in use has changed a bit but where a sequence wrote what is its own
      And <used> blocks are in use

      Examples:
        | forks                  | writers                         | tokens | copies | used |
        | "bob"                  | "bob"                           | 1      | 1      | 3    |
        | "bob"                  | "alice"                         | 1      | 1      | 3    |
        | "bob"                  | "alice" and "bob"               | 1      | 1      | 3    |
        | "bob"                  | "alice" and "bob"               | 13     | 1      | 5    |
        | "bob", "carol"         | "carol"                         | 1      | 1      | 3    |
        | "bob", "carol"         | "alice" and "bob"               | 1      | 2      | 4    |
        | "bob", "carol", "dave" | "alice", "bob", "carol", "dave" | 1      | 3      | 5    |
        | "bob", "carol", "dave" | "alice", "bob", "carol", "dave" | 30     | 3      | 13   |

    @R4.3
    Scenario: Once it has a copy, a sequence writes on in it
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "alice" of 20 tokens
      And "bob" is forked from "alice"
      When "bob" grows token by token to 32 tokens
      And "alice" grows token by token to 32 tokens
      Then 1 block was copied
      And every token of "alice" and "bob" reads back as it was written

    @R4.3
    Scenario Outline: Nothing is copied at the end of a block: <tokens> tokens
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "alice" of <tokens> tokens
      And "bob" is forked from "alice"
      When "alice" and "bob" grow by 1 token in the same step
      Then 0 blocks were copied
      And <used> blocks are in use
      And every token of "alice" and "bob" reads back as it was written

      Examples:
        | tokens | used |
        | 16     | 3    |
        | 32     | 4    |

    @R4.3
    Scenario: Without a block for the copy, the write is refused
      Given a pool of 2 blocks of 16 tokens that shares prefixes
      And a text "alice" of 20 tokens
      And "bob" is forked from "alice"
      When "bob" tries to write 1 token
      Then it is refused: 1 block wanted, 0 free, 2 in the pool
      And nothing has changed

    @R4.3
    Scenario: A copy takes the room of something cached
      Given a pool of 3 blocks of 16 tokens that shares prefixes
      And a text "old" of 16 tokens was stored and freed
      And a text "alice" of 20 tokens
      And "bob" is forked from "alice"
      When "bob" grows by 1 token
      Then 1 block was copied
      And the first 0 blocks of "old" are cached, and no more
      And every token of "alice" and "bob" reads back as it was written

    @R4.3
    Scenario: Without sharing, and in contiguous memory, a fork is as safe
      Given a pool of 2 contiguous slots of 64 tokens holding texts
      And a text "alice" of 20 tokens
      And "bob" is forked from "alice"
      And what each sequence reads is kept to compare with
      When "alice" and "bob" grow by 1 token in the same step
      Then each sequence reads what was kept, bit for bit, before what is new
      And every token of "alice" and "bob" reads back as it was written
      And "alice" shares no blocks with "bob"

  Rule: Several samples of one prompt share it until they diverge

    @R4.4
    Scenario Outline: 4 samples of a prompt of <prompt> tokens
      Given the model "qwen3"
      And a server with 32 blocks of 16 tokens that shares prefixes
      And a request "alice" of <prompt> prompt tokens and 8 output tokens in 4 samples
      When the server steps until the samples run
      Then the samples have the same <blocks> blocks, and <blocks> blocks are in use
      When the server steps until the samples have diverged
      Then the samples have the same first <full> blocks and 1 of their own each
      When the server steps until it has no work
      Then <copies> blocks were copied
      And the prompt was computed once, and its last token once more for each further sample
      And the samples are not all alike
      And contiguous memory gives the same samples
      And every block is free

      Examples:
        | prompt | blocks | full | copies |
        | 40     | 3      | 2    | 3      |
        | 32     | 2      | 2    | 0      |
        | 33     | 3      | 2    | 3      |
        | 5      | 1      | 0    | 3      |

    @R4.4
    Scenario: Greedy samples are one answer, n times
      Given the model "llama"
      And a server with 32 blocks of 16 tokens that shares prefixes
      And a request "alice" of 40 prompt tokens and 12 output tokens in 3 greedy samples
      When the server steps until it has no work
      Then each sample is what transformers generates, token for token

    @R4.4
    Scenario: Samples that find no room for all of them wait, and still come out right
      Given the model "qwen3"
      And no admission reserve
      And a server with 6 blocks of 16 tokens that shares prefixes
      And a request "alice" of 40 prompt tokens and 20 output tokens in 6 samples
      When the server steps until it has no work
      Then contiguous memory gives the same samples
      And every block is free

  Rule: Sharing changes no answer

    @R4.5
    Scenario Outline: <model>: 6 prompts behind the same <same> tokens, cold, warm and without sharing, in <memory>
      Given the model "<model>"
      And steps of up to <step> tokens
      And a server with <memory> that shares prefixes
      When 6 prompts of 3 to 40 tokens behind the same <same> ask for 12 tokens each
      Then every answer is what transformers generates, token for token
      When the same prompts are asked again
      Then <found> of their tokens were found in the cache
      And every answer is what transformers generates, token for token
      And a server with <memory> that shares nothing gives the same answers to all
      And every block is free

      Examples:
        | model       | same | step | memory                 | found |
        | qwen3       | 40   | 64   | 64 blocks of 16 tokens | 335   |
        | qwen3       | 48   | 9    | 64 blocks of 16 tokens | 383   |
        | llama       | 33   | 64   | 64 blocks of 16 tokens | 288   |
        | llama3 rope | 40   | 256  | 256 blocks of 4 tokens | 358   |
        | qwen3       | 7    | 64   | 800 blocks of 1 token  | 163   |
        | qwen2       | 40   | 64   | 64 blocks of 16 tokens | 335   |
        | gemma3      | 40   | 64   | 64 blocks of 16 tokens | 335   |
        | gemma3      | 48   | 9    | 64 blocks of 16 tokens | 383   |

    @R4.5
    Scenario: Preempted sequences find their own blocks again, and answer the same
      Given the model "qwen3"
      And no admission reserve
      And a server with 14 blocks of 16 tokens that shares prefixes
      When 6 prompts of 3 to 40 tokens behind the same 40 ask for 32 tokens each
      Then some were preempted, and found tokens again on their return
      And every answer is what transformers generates, token for token
      And every block is free

    @R4.5
    Scenario: A step that fails leaves nothing to share
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "before" of 40 tokens
      When a step fails that computes the 40 tokens of a new text "alice"
      Then the first 0 blocks of "alice" are cached, and no more
      And the first 2 blocks of "before" are cached, and no more
      When "alice" ends
      And a text "bob" arrives with the tokens of "alice"
      Then "bob" found 0 of its tokens in the cache and computed 40
      And every token of "before" and "bob" reads back as it was written

    @R4.5
    Scenario: A server whose model fails once answers the next request with the same prompt
      Given the model "qwen3"
      And a server with 16 blocks of 16 tokens that shares prefixes
      And a request "alice" of 40 prompt tokens and 8 output tokens
      And the model fails half-way in every pass
      When the server steps once
      Then "alice" has failed
      When the fault is over
      And a request "bob" comes with the prompt of "alice" and 8 output tokens
      And the server steps until it has no work
      Then "bob" found 0 of its prompt tokens in the cache
      And "bob" got what transformers generates, token for token

  Rule: A prompt that is cached to its last token costs one token

    @R4.6
    Scenario Outline: A prompt of <tokens> tokens in blocks of <block_size>, all of it cached
      Given the model "<model>"
      And a server with <pool> blocks of <block_size> tokens that shares prefixes
      And a request "alice" of <tokens> prompt tokens and 4 output tokens
      When the server steps until it has no work
      And a request "bob" comes with the prompt of "alice" and 4 output tokens
      And the server steps once
      Then that step computed 1 prompt token, and found all others in the cache
      And that step allocated the <blocks> blocks of the prompt and no other
      And "bob" and "alice" have the same first token
      And K and V of the prompt have not changed a bit
      When the server steps until it has no work
      Then "bob" got what transformers generates, token for token

      Examples:
        | model | tokens | block_size | pool | blocks |
        | qwen3 | 32     | 16         | 8    | 2      |
        | qwen3 | 16     | 16         | 8    | 1      |
        | llama | 32     | 8          | 16   | 4      |
        | llama | 5      | 1          | 64   | 5      |

    @R4.6
    Scenario Outline: A prompt of <tokens> tokens behind 64 cached ones computes <computed>
      Given a pool of 16 blocks of 16 tokens that shares prefixes
      And a text "alice" of 64 tokens
      When a text "bob" of <tokens> tokens arrives whose first <tokens> are those of "alice"
      Then "bob" found <found> of its tokens in the cache and computed <computed>
      And "bob" shares <shared> blocks with "alice"

      Examples:
        | tokens | found | computed | shared |
        | 31     | 16    | 15       | 1      |
        | 32     | 31    | 1        | 2      |
        | 33     | 32    | 1        | 2      |
        | 64     | 63    | 1        | 4      |

  Rule: Tenants never share, and hashes are not trusted

    @R4.7
    Scenario Outline: The same 40 tokens under the salts "<first>" and "<second>"
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "alice" of 40 tokens, under the salt "<first>"
      When a text "bob" arrives with the tokens of "alice", under the salt "<second>"
      Then "bob" shares <shared> blocks with "alice"
      And "bob" found <found> of its tokens in the cache and computed <rest>

      Examples:
        | first  | second | shared | found | rest |
        | red    | blue   | no     | 0     | 40   |
        | none   | blue   | no     | 0     | 40   |
        | red    | none   | no     | 0     | 40   |
        | red    | red    | 2      | 32    | 8    |
        | none   | none   | 2      | 32    | 8    |

    @R4.7
    Scenario Outline: Two tenants ask the same in <when>
      Given the model "qwen3"
      And batches of up to <batch> sequences
      And a server with 16 blocks of 16 tokens that shares prefixes
      And requests of the tenants "red" and "blue" with the same 48 prompt tokens and 8 output tokens
      When the server steps until it has no work
      Then the server computed 96 prompt tokens, and found 0 in the cache
      And every answer is what transformers generates, token for token

      Examples:
        | when           | batch |
        | turn           | 1     |
        | the same batch | 2     |

    @R4.7
    Scenario Outline: Texts that differ, where <collision>
      Given a pool of 24 blocks of 16 tokens that shares prefixes, where <collision>
      And a text "alice" of 64 tokens
      When a text "bob" of 64 tokens arrives
      Then "bob" shares no blocks with "alice"
      When a text "carol" of 64 tokens arrives that begins as "bob" for 16, and then goes on as "alice"
      Then "carol" shares no blocks with "alice"
      When a text "dave" arrives that says the first 16 tokens of "alice" 3 times
      Then "dave" shares 1 block with "alice"
      And "dave" found 16 of its tokens in the cache and computed 32
      And every token of "alice", "bob", "carol" and "dave" reads back as it was written

      Examples:
        | collision                                        |
        | every hash is the same                           |
        | a block's hash is its first byte                 |
        | hashes are one of three                          |

  Rule: Of equal blocks that are filled at the same time, one copy stays

    @R4.8
    Scenario Outline: <names> compute the same <tokens> tokens in the same step
      Given a pool of 16 blocks of 16 tokens that shares prefixes
      And <names> are opened with the same <tokens> tokens
      When <names> compute <tokens> tokens in the same step
      Then <merged> blocks were given back because an equal one was there
      And "alice" shares <full> blocks with <others>
      And <used> blocks are in use
      And every token of <names> reads back as it was written
      And "alice" holds <held> blocks

      Examples:
        | names                    | others            | tokens | merged | full | used | held |
        | "alice" and "bob"        | "bob"             | 40     | 2      | 2    | 4    | 3    |
        | "alice" and "bob"        | "bob"             | 32     | 2      | 2    | 2    | 2    |
        | "alice" and "bob"        | "bob"             | 15     | 0      | 0    | 2    | 1    |
        | "alice", "bob" and "carol" | "bob" and "carol" | 40   | 4      | 2    | 5    | 3    |

    @R4.8
    Scenario: Both of two equal blocks stay where a pool keeps them, as vLLM's does
      Given a pool of 16 blocks of 16 tokens that shares prefixes and keeps equal blocks
      And "alice" and "bob" are opened with the same 40 tokens
      When "alice" and "bob" compute 40 tokens in the same step
      Then 0 blocks were given back because an equal one was there
      And 6 blocks are in use
      And every token of "alice" and "bob" reads back as it was written

    @R4.8
    Scenario: Answers that say the same fill a block token by token
      Given a pool of 16 blocks of 16 tokens that shares prefixes
      And a text "alice" of 20 tokens
      And a text "bob" with the tokens of "alice"
      And "alice" and "bob" go on with the same 12 tokens
      When "alice" and "bob" compute 11 tokens, one in each step
      Then 3 blocks are in use
      When "alice" and "bob" compute 1 tokens in the same step
      Then 1 block was given back because an equal one was there
      And "alice" shares 2 blocks with "bob"
      And 2 blocks are in use
      And every token of "alice" and "bob" reads back as it was written

    @R4.8
    Scenario: Forks that diverged and then say the same in a later block stay apart
      Given a pool of 16 blocks of 16 tokens that shares prefixes
      And a text "alice" of 20 tokens
      And "bob" is forked from "alice"
      When "alice" and "bob" grow by 12 tokens in the same step
      And "alice" and "bob" go on with the same 16 tokens
      And "alice" and "bob" compute 16 tokens in the same step
      Then 0 blocks were given back because an equal one was there
      And "alice" shares 1 block with "bob"
      And every token of "alice" and "bob" reads back as it was written

    @R4.8
    Scenario: Two users who ask the same at the same time are given one copy of the answer
      Given the model "qwen3"
      And a server with 16 blocks of 16 tokens that shares prefixes
      And requests with the same 20 prompt tokens and 14, 14 and 14 output tokens
      When the server steps until each has 13 tokens
      Then 2 blocks were given back because an equal one was there
      And all of them have the same 2 blocks
      When the server steps until it has no work
      Then every answer is what transformers generates, token for token
      And every block is free
