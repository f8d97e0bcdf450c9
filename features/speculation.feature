Feature: Speculative decoding by lookup
  What followed the newest tokens the last time that they occurred is proposed as what follows now. The model checks
  all of it in one step, and keeps what it would have said itself. A model that says "one| two" has a token for each
  piece between the bars.

  Rule: The answer is that of one token at a time, in fewer steps

    @R10.6
    Scenario Outline: Tokens are looked up where <what>
      Given a model that says "<script>"
      And the same model, whose tokens are looked up 3 at a time
      When a request asks for up to 12 tokens <how>
      Then the answer has <tokens> tokens and ended by "<reason>"
      And its text is <text>
      And the text came piece by piece, none of it taken back
      And it took <steps> forward passes, in which <accepted> of <proposed> proposed tokens were accepted

      Examples:
        | what                             | script                                | how                            | tokens | reason | text           | steps | accepted | proposed |
        | text repeats                     | a\|b\|c\|a\|b\|c\|a\|b\|c\|a\|b\|c    |                                | 12     | length | "abcabcabcabc" | 7     | 5        | 5        |
        | a proposal is wrong              | a\|b\|c\|a\|b\|d\|a\|b\|d\|a\|b\|d    |                                | 12     | length | "abcabdabdabd" | 9     | 3        | 6        |
        | nothing repeats                  | a\|b\|c\|d\|e\|f\|g\|h\|i\|j\|k\|l    |                                | 12     | length | "abcdefghijkl" | 12    | 0        | 0        |
        | a run meets the end of sequence  | a\|b\|c\|a\|b\|c\|a\|</s>\|c\|a\|b\|c |                                | 8      | stop   | "abcabca"      | 6     | 2        | 3        |
        | a stop string is within a run    | a\|b\|c\|a\|b\|c\|a\|b\|c\|a\|b\|c    | with the stop string "abcabca" | 7      | stop   | ""             | 6     | 3        | 3        |

    @R10.6
    Scenario Outline: A model that reads K and V, with <how>
      When a tiny model is run with "workload.output_len.max=40 <how>" and with "workload.output_len.max=40 <how> scheduler.speculation.method=ngram scheduler.speculation.prompt_lookup_min=1"
      Then both runs had the same prompts and produced the same tokens
      And the second took fewer steps, and accepted some proposed tokens and not all

      Examples:
        | how                                                   |
        | kv=contiguous                                         |
        | kv=paged attention=cpu                                |
        | kv=paged attention=sdpa kv.block_size=1               |
        | kv.num_blocks=10 scheduler.admission_reserve=0        |

  Rule: A run says what was proposed and accepted

    @R10.6 @tracked
    Scenario: The figures are in the table and in the tracking store
      When I run "scheduler.speculation.method=ngram scheduler.speculation.prompt_lookup_min=1 workload.num_requests=4" on a tiny model
      Then the command succeeds
      And all 4 requests were completed
      And the message says "share of proposed tokens accepted"
      And the message says "tokens of a sequence per step"
      And it has the metrics
        | metric                      |
        | speculation/proposed_tokens |
        | speculation/accepted_tokens |
        | speculation/acceptance_rate |
        | speculation/tokens_per_step |
      And they equal those of summary.json

  Rule: Where it cannot be done it is refused

    @R10.6
    Scenario Outline: <what> is refused
      When I run "<settings>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | what                | settings                                                                | message                                                                                                                 |
        | a simulated device  | scheduler.speculation.method=ngram executor=simulated hardware=h100_sxm | scheduler.speculation.method=ngram: executor=simulated computes no tokens ... leave it null                         |
        | another engine      | scheduler.speculation.method=ngram engine=transformers_static           | scheduler.speculation.method=ngram: is for kvlab's own engine, and engine=transformers_static is another; leave it null |
        | an unknown method   | scheduler.speculation.method=eagle                                      | scheduler.speculation.method=eagle: unknown; known: ngram                                                               |
        | no tokens           | scheduler.speculation.num_speculative_tokens=0                          | scheduler.speculation.num_speculative_tokens=0: must be a number, at least 1                                            |
        | a lookup of nothing | scheduler.speculation.prompt_lookup_max=1                               | scheduler.speculation.prompt_lookup_max=1: is less than scheduler.speculation.prompt_lookup_min=2                       |
