Feature: The engine is kept busy, and no request is lost, overtaken or starved

  # "a 4" in a step is a prompt, or a part of one, of 4 tokens; "a" alone is one token.

  Rule: In continuous batching sequences leave and enter in every step; in static batching the batch is run to its end

    @R9.1
    Scenario Outline: Two at a time, policy=<policy>
      Given the model "qwen3"
      And scheduling with policy=<policy>, max_batch_size=2, max_batched_tokens=64, max_wait_ms=0
      And a server with 64 blocks of 4 tokens
      And the requests
        | name | prompt | output |
        | a    | 4      | 2      |
        | b    | 4      | 7      |
        | c    | 4      | 1      |
        | d    | 4      | 3      |
      When the server steps until it has no work
      Then its steps were "<steps>"
      And every answer is what transformers generates, token for token
      And every block is free

      Examples:
        | policy     | steps                                                               |
        | continuous | a 4, b 4; a, b; b, c 4; b, d 4; b, d; b, d; b                       |
        | static     | a 4, b 4; a, b; b; b; b; b; b; c 4, d 4; d; d                       |

    @R9.1
    Scenario: One that arrives while a static batch runs waits, though there is room
      Given the model "qwen3"
      And scheduling with policy=static, max_batch_size=4, max_batched_tokens=64, max_wait_ms=0
      And a server with 64 blocks of 4 tokens
      And the requests
        | name | prompt | output |
        | a    | 4      | 3      |
      When the server steps once
      And the requests arrive
        | name | prompt | output |
        | late | 4      | 2      |
      And the server steps until it has no work
      Then its steps were "a 4; a; a; late 4; late"

  Rule: Admission stops at the batch limit, and at the memory budget less what it has to leave

    # A pool of 24 blocks of 4 tokens; eight requests of one token each. A reserve is a share of what is free when
    # the step begins, a watermark of the whole pool; prompts count in whole blocks.

    @R9.2
    Scenario Outline: Eight prompts of <prompt> tokens with <settings>
      Given the model "qwen3"
      And scheduling with max_batched_tokens=256, <settings>
      And a server with 24 blocks of 4 tokens
      And 8 requests of <prompt> prompt tokens and 1 output token
      When the server steps once
      Then <running> run and <waiting> wait
      When the server steps until it has no work
      Then every answer is what transformers generates, token for token

      Examples: the batch limit
        | settings                               | prompt | running | waiting |
        | max_batch_size=3, admission_reserve=0  | 4      | 3       | 5       |
        | max_batch_size=8, admission_reserve=0  | 4      | 8       | 0       |

      Examples: the memory budget
        | settings                               | prompt | running | waiting |
        | admission_reserve=0                    | 16     | 6       | 2       |
        | admission_reserve=0.2                  | 16     | 4       | 4       |
        | admission_reserve=0.2                  | 13     | 4       | 4       |
        | admission_reserve=0.2                  | 12     | 6       | 2       |
        | admission_reserve=0.99                 | 16     | 1       | 7       |
        | admission_reserve=0, watermark=0.1     | 16     | 5       | 3       |
        | admission_reserve=0.2, watermark=0.5   | 16     | 3       | 5       |

    @R9.2
    Scenario Outline: Four requests that grow from 8 to <total> tokens, where whole outputs have to fit: <whole>
      Given the model "qwen3"
      And scheduling with reserve_output=<whole>, admission_reserve=0, max_batched_tokens=256
      And a server with 24 blocks of 4 tokens
      And 4 requests of 8 prompt tokens and <output> output tokens
      When the server steps once
      Then <running> run and <waiting> wait
      When the server steps until it has no work
      Then <preempted> sequences were preempted
      And every answer is what transformers generates, token for token

      Examples:
        | whole | output | total | running | waiting | preempted   |
        | true  | 24     | 32    | 3       | 1       | no          |
        | true  | 40     | 48    | 2       | 2       | no          |
        | false | 24     | 32    | 4       | 0       | some        |

  Rule: A prompt is admitted where all of it fits, or where its first chunk does

    @R9.2
    Scenario Outline: Two prompts of 60 tokens in chunks of 16, memory for one and a half, where whole prompts have to fit: <whole>
      Given the model "qwen3"
      And scheduling with reserve_prompt=<whole>, admission_reserve=0, max_batched_tokens=16
      And a server with 24 blocks of 4 tokens
      And 2 requests of 60 prompt tokens and 8 output tokens
      When the server steps 4 times
      Then <running> run and <waiting> wait
      When the server steps until it has no work
      Then <preempted> sequences were preempted
      And every answer is what transformers generates, token for token

      Examples:
        | whole | running | waiting | preempted |
        | true  | 1       | 1       | no        |
        | false | 2       | 0       | some      |

  Rule: Blocks freed in a step serve an admission in that same step

    @R9.3
    Scenario Outline: A sequence that <end> makes room for the next
      Given the model "qwen3"
      And a server with 24 blocks of 4 tokens
      And a request "first" of 60 prompt tokens and 4 output tokens
      And a request "second" of 62 prompt tokens and 2 output tokens
      When the server steps until "first" <event>
      Then "second" is waiting
      When the server steps once
      Then "second" runs in blocks that "first" held
      And that step freed 16 blocks and allocated 16

      Examples:
        | end           | event                     |
        | is complete   | is complete               |
        | is aborted    | is aborted after 2 tokens |

  Rule: First come, first served, and each other order does what its name says

    @R9.4
    Scenario Outline: One at a time, order=<order>
      Given the model "qwen3"
      And scheduling with order=<order>, max_batch_size=1
      And a server with 64 blocks of 4 tokens
      And the requests
        | name | prompt | output | priority |
        | a    | 30     | 4      | 5        |
        | b    | 10     | 4      | 1        |
        | c    | 20     | 4      | 0        |
        | d    | 10     | 4      | 1        |
      When the server steps until it has no work
      Then they entered in the order <entered>
      And every answer is what transformers generates, token for token

      Examples:
        | order              | entered            |
        | fcfs               | "a", "b", "c", "d" |
        | prefill_first      | "a", "b", "c", "d" |
        | decode_round_robin | "a", "b", "c", "d" |
        | shortest_first     | "b", "d", "c", "a" |
        | priority           | "c", "b", "d", "a" |
        | longest_prefix     | "a", "b", "c", "d" |
        | deadline           | "a", "b", "c", "d" |

    @R9.4
    Scenario Outline: The prompt of "first" is in the cache and one at a time is served, order=<order>
      Given the model "qwen3"
      And scheduling with order=<order>, max_batch_size=1
      And a clock on which each step takes 0.1 seconds
      And a server with 64 blocks of 4 tokens that shares prefixes, on that clock
      And the requests
        | name  | prompt | output | deadline |
        | first | 30     | 4      | 1        |
      When the server steps until it has no work
      And the requests arrive
        | name   | prompt | output | deadline | prompt of |
        | new    | 10     | 4      | 9        |           |
        | soon   | 10     | 4      | 3        |           |
        | cached | 30     | 4      | 6        | first     |
      And the server steps until it has no work
      Then they entered in the order <entered>
      And every answer is what transformers generates, token for token

      Examples:
        | order          | entered                            |
        | longest_prefix | "first", "cached", "new", "soon"   |
        | deadline       | "first", "soon", "cached", "new"   |

    @R9.4
    Scenario: The head of the waiting queue that does not fit stops admission
      Given the model "qwen3"
      And a server with 24 blocks of 4 tokens
      And the requests
        | name    | prompt | output |
        | running | 60     | 8      |
        | large   | 60     | 2      |
        | small   | 4      | 2      |
      When the server steps until it has no work
      Then "small" entered in the step of "large", after "running" was complete

    @R9.4
    Scenario Outline: A prompt of 19 tokens beside one that decodes, 8 tokens a step, order=<order>
      Given the model "qwen3"
      And scheduling with order=<order>, max_batch_size=4, max_batched_tokens=8
      And a server with 64 blocks of 4 tokens
      And the requests
        | name | prompt | output |
        | a    | 4      | 6      |
      When the server steps once
      And the requests arrive
        | name | prompt | output |
        | p    | 19     | 1      |
      And the server steps until it has no work
      Then its steps were "<steps>"
      And every answer is what transformers generates, token for token

      Examples:
        | order         | steps                                  |
        | fcfs          | a 4; a, p 7; a, p 7; a, p 5; a; a      |
        | prefill_first | a 4; p 8; p 8; p 3, a; a; a; a; a      |
        | prefill_alone | a 4; p 8; p 8; p 3; a; a; a; a; a      |

    @R29.20
    Scenario: Prompts wait for more of them while others decode
      Given the model "qwen3"
      And scheduling with prefill_wait_steps=2
      And a server with 64 blocks of 4 tokens
      And the requests
        | name | prompt | output |
        | a    | 4      | 6      |
      When the server steps once
      And the requests arrive
        | name | prompt | output |
        | p    | 5      | 1      |
      And the server steps until it has no work
      Then its steps were "a 4; a; a; a, p 5; a; a"

    @R9.4
    Scenario: Five that decode, two in each step, in turn
      Given the model "qwen3"
      And scheduling with order=decode_round_robin, max_decode_seqs=2
      And a server with 64 blocks of 4 tokens
      And the requests
        | name | prompt | output |
        | a    | 4      | 3      |
        | b    | 4      | 3      |
        | c    | 4      | 3      |
        | d    | 4      | 3      |
        | e    | 4      | 3      |
      When the server steps until it has no work
      Then its steps were "a 4, b 4, c 4, d 4, e 4; a, b; c, d; e, a; b, c; d, e"
      And every answer is what transformers generates, token for token

  Rule: A full waiting queue refuses with a clear answer, and nothing accepted is lost

    @R9.5
    Scenario: Three may wait
      Given the model "qwen3"
      And scheduling with max_batch_size=1, max_waiting_requests=3
      And a server with 64 blocks of 4 tokens
      And 3 requests of 8 prompt tokens and 4 output tokens
      When a request "fourth" of 8 prompt tokens and 4 output tokens is refused
      Then the refusal says "'fourth': 3 requests are waiting, and scheduler.max_waiting_requests=3 allows no more"
      When the server steps once
      And the requests arrive
        | name  | prompt | output |
        | fifth | 8      | 4      |
      And the server steps until it has no work
      Then every answer is what transformers generates, token for token
      And every block is free

  Rule: Decode goes before prefill, chunks stay within the step's tokens, and no chunk size changes an answer

    @R9.6
    Scenario: Three prompts of 400 tokens, 512 tokens a step, no more than 200 of one
      Given the model "qwen3"
      And scheduling with max_batched_tokens=512, long_prefill_threshold=200, admission_reserve=0
      And a server with 100 blocks of 16 tokens
      And the requests
        | name | prompt | output |
        | a    | 400    | 2      |
        | b    | 400    | 2      |
        | c    | 400    | 2      |
      When the server steps until it has no work
      Then its steps were "a 200, b 200, c 112; a 200, b 200, c 112; a, b, c 176; c"
      And every answer is what transformers generates, token for token

    @R9.6
    Scenario Outline: 6 prompts in steps of up to <budget> tokens, at most <threshold> of one, mixed=<mixed>, through <memory>
      Given the model "qwen3"
      And scheduling with max_batch_size=6, max_batched_tokens=<budget>, long_prefill_threshold=<threshold>, mixed=<mixed>
      And a server with <memory>
      When 6 prompts of 3 to 60 tokens ask for 12 tokens each
      Then no step had more than <budget> tokens, nor more than <threshold> of a prompt
      And every decoding sequence was in every step, ahead of the prompts
      And every answer is what transformers generates, token for token
      And every block is free

      Examples:
        | budget | threshold | mixed | memory                                     |
        | 7      | 7         | true  | 64 blocks of 16 tokens                     |
        | 16     | 5         | true  | 64 blocks of 16 tokens                     |
        | 64     | 64        | true  | 64 blocks of 16 tokens                     |
        | 16     | 5         | false | 64 blocks of 16 tokens                     |
        | 16     | 16        | false | 64 blocks of 16 tokens that shares prefixes |
        | 16     | 5         | true  | 6 contiguous slots of 96 tokens            |
        | 16     | 5         | false | 6 contiguous slots of 96 tokens            |

  Rule: When memory runs out one sequence is preempted, is admitted again first, and gets the tokens it would have had

    @R9.7
    Scenario Outline: The victim is <who>: preemption.victim=<victim>, in <memory>
      Given the model "qwen3"
      And scheduling with preemption.victim=<victim>, admission_reserve=0, max_batched_tokens=24, long_prefill_threshold=12
      And a server with <memory>
      And the requests
        | name | prompt | output | priority |
        | a    | 48     | 40     | 2        |
        | b    | 12     | 60     | 9        |
        | c    | 12     | 30     | 0        |
      When the server steps until a sequence is preempted
      Then that is "<preempted>"
      And it has the tokens that it was given, and no blocks
      When the server steps until it has no work
      Then every answer is what transformers generates, token for token
      And every token was output once
      And the tokens computed again are counted
      And every block is free

      Examples:
        | victim           | preempted | who                            | memory                                     |
        | last_admitted    | c         | who entered last               | 25 blocks of 4 tokens                      |
        | last_admitted    | c         | who entered last               | 25 blocks of 4 tokens that shares prefixes |
        | fewest_generated | a         | who has the fewest tokens      | 22 blocks of 4 tokens                      |
        | fewest_generated | a         | who has the fewest tokens      | 22 blocks of 4 tokens that shares prefixes |
        | priority         | b         | who is least urgent            | 25 blocks of 4 tokens                      |

    @R9.7
    Scenario: The order by priority preempts the least urgent unless a victim is named
      Given the model "qwen3"
      And scheduling with order=priority, admission_reserve=0, max_batched_tokens=24, long_prefill_threshold=12
      And a server with 25 blocks of 4 tokens
      And the requests
        | name | prompt | output | priority |
        | a    | 12     | 60     | 9        |
      When the server steps once
      And the requests arrive
        | name | prompt | output | priority |
        | b    | 48     | 40     | 2        |
        | c    | 12     | 30     | 3        |
      And the server steps until a sequence is preempted
      Then that is "a"
      And it has the tokens that it was given, and no blocks

    @R9.7
    Scenario: A preempted sequence enters before those that wait
      Given the model "qwen3"
      And scheduling with admission_reserve=0, max_batch_size=3
      And a server with 15 blocks of 4 tokens
      And 3 requests of 20 prompt tokens and 30 output tokens
      And a request "late" of 2 prompt tokens and 1 output tokens
      When the server steps until "request-2" is evicted
      And the server steps until it has no work
      Then "late" entered after "request-2" had returned
      And every answer is what transformers generates, token for token

    @R9.7
    Scenario: What it finds of its own on its return is no hit
      Given the model "qwen3"
      And scheduling with admission_reserve=0
      And a server with 15 blocks of 4 tokens that shares prefixes
      And 3 requests of 20 prompt tokens and 30 output tokens
      When the server steps until it has no work
      Then some were preempted, and found tokens again on their return
      And 0 of their tokens were found in the cache
      And every answer is what transformers generates, token for token

    @R9.7
    Scenario: Where no sequence may be preempted, those that do not fit fail by name, and no other
      Given the model "qwen3"
      And scheduling with admission_reserve=0, on_exhaustion=fail, max_batched_tokens=128
      And a server with 21 blocks of 4 tokens
      And 4 requests of 20 prompt tokens and 4 output tokens
      When the server steps until it has no work
      Then "request-0" got what transformers generates, token for token
      And "request-1", "request-2" and "request-3" failed, since "request-1", "request-2" and "request-3" did not fit
      And every block is free

  Rule: A request that can never fit is refused on arrival, and the others are served

    @R9.8
    Scenario Outline: <prompt> + <output> tokens where 96 fit in <memory>
      Given the model "qwen3"
      And a server with <memory>
      And 3 requests of 20 prompt tokens and 10 output tokens
      When a request "huge" of <prompt> prompt tokens and <output> output tokens is refused
      Then the refusal says "the pool takes sequences of up to 96 tokens; <advice> would fit"
      When the server steps until it has no work
      Then every answer is what transformers generates, token for token

      Examples:
        | prompt | output | memory                          | advice                       |
        | 90     | 7      | 24 blocks of 4 tokens           | max_tokens=6                 |
        | 300    | 1      | 24 blocks of 4 tokens           | a prompt of up to 95 tokens  |
        | 90     | 7      | 3 contiguous slots of 96 tokens | max_tokens=6                 |

    @R9.8
    Scenario: One as long as the pool is served
      Given the model "qwen3"
      And a server with 24 blocks of 4 tokens
      When 1 request of 50 prompt tokens and 46 output tokens is served
      Then every answer is what transformers generates, token for token

  Rule: No request starves

    @R9.9
    Scenario Outline: Three times what fits, all at once, order=<order>, in <memory>
      Given the model "qwen3"
      And scheduling with order=<order>, max_batch_size=6, max_batched_tokens=24, max_decode_seqs=3, admission_reserve=0
      And a server with <memory>
      When 18 prompts of 5 to 11 tokens ask for 12 tokens each
      Then every answer is what transformers generates, token for token
      And every block is free

      Examples:
        | order              | memory                                     |
        | fcfs               | 24 blocks of 4 tokens                      |
        | fcfs               | 24 blocks of 4 tokens that shares prefixes |
        | fcfs               | 4 contiguous slots of 24 tokens            |
        | prefill_first      | 24 blocks of 4 tokens                      |
        | decode_round_robin | 24 blocks of 4 tokens                      |
        | shortest_first     | 24 blocks of 4 tokens                      |
        | priority           | 24 blocks of 4 tokens                      |
        | longest_prefix     | 24 blocks of 4 tokens that shares prefixes |
        | deadline           | 24 blocks of 4 tokens                      |

    # Each step takes 0.1 seconds. Every other request is shorter and more urgent than "patient", has to be complete
    # earlier, and its prompt is in the cache.

    @R9.9
    Scenario Outline: One that every other request goes before is complete while they never stop coming, order=<order>
      Given the model "qwen3"
      And scheduling with order=<order>, aging_s=<aging_s>, default_deadline_s=6, max_batch_size=3, max_decode_seqs=2
      And a clock on which each step takes 0.1 seconds
      And a server with 64 blocks of 4 tokens that shares prefixes, on that clock
      And the requests
        | name    | prompt | output | priority |
        | patient | 40     | 8      | 5        |
      When for 150 steps shorter, more urgent requests with a cached prompt never stop coming, so that 6 always wait
      Then "patient" was complete within <steps> steps

      Examples:
        | order              | aging_s | steps |
        | fcfs               | null    | 15    |
        | prefill_first      | null    | 30    |
        | decode_round_robin | null    | 30    |
        | shortest_first     | 100     | 60    |
        | priority           | 1       | 80    |
        | longest_prefix     | 1000    | 120   |
        | deadline           | null    | 80    |

    @R9.9
    Scenario Outline: Without aging it is never admitted, order=<order>
      Given the model "qwen3"
      And scheduling with order=<order>, aging_s=null, max_batch_size=3
      And a clock on which each step takes 0.1 seconds
      And a server with 64 blocks of 4 tokens that shares prefixes, on that clock
      When for 1 steps shorter, more urgent requests with a cached prompt never stop coming, so that 6 always wait
      And the requests arrive
        | name    | prompt | output | priority |
        | patient | 40     | 8      | 5        |
      And for 150 steps shorter, more urgent requests with a cached prompt never stop coming, so that 6 always wait
      Then "patient" has not been admitted

      Examples:
        | order          |
        | shortest_first |
        | priority       |
        | longest_prefix |
