Feature: A failure ends the sequences that cause it, and nothing else

  Rule: A step that fails is rolled back, and run again without its culprit

    # The fault strikes in the pass that computes the culprit's third token.

    @R10.1
    Scenario Outline: One of five fails <when>, in <memory>
      Given the model "qwen3"
      And scheduling with mixed=<mixed>
      And a server with <memory>
      And 5 requests of 20 prompt tokens, the first 16 of which are the same, and 8 output tokens
      And the model fails <when> wherever "<culprit>" takes part, from its third token on
      When the server steps until it has no work
      Then "<culprit>" failed after 2 tokens of output
      And every other answer is what transformers generates, token for token
      And every block is free
      When the fault is over
      And a request "after" comes with the prompt of "<culprit>" and 8 output tokens
      And the server steps until it has no work
      Then "after" got what transformers generates, token for token

      Examples:
        | when                              | culprit   | mixed | memory                                      |
        | before it computes                | request-0 | true  | 32 blocks of 8 tokens                       |
        | before it computes                | request-4 | true  | 32 blocks of 8 tokens that shares prefixes  |
        | half-way                          | request-2 | true  | 32 blocks of 8 tokens                       |
        | half-way                          | request-2 | false | 32 blocks of 8 tokens that shares prefixes  |
        | half-way                          | request-2 | true  | 5 contiguous slots of 64 tokens             |
        | with logits that are no numbers   | request-3 | true  | 32 blocks of 8 tokens                       |
        | with logits that are no numbers   | request-3 | true  | 5 contiguous slots of 64 tokens             |

    @R10.1
    Scenario Outline: A prompt that others share fails <when>
      Given the model "qwen3"
      And a server with 32 blocks of 8 tokens that shares prefixes
      And 4 requests of 20 prompt tokens, the first 16 of which are the same, and 8 output tokens
      And the model fails <when> wherever "request-0" takes part, from its first token on
      When the server steps until it has no work
      Then "request-0" failed after 0 tokens of output
      And every other answer is what transformers generates, token for token
      And every block is free

      Examples:
        | when                            |
        | before it computes              |
        | half-way                        |
        | with logits that are no numbers |

    @R10.1
    Scenario: A fault that does not come back fails no request
      Given the model "qwen3"
      And a server with 32 blocks of 8 tokens that shares prefixes
      And 4 requests of 20 prompt tokens, the first 16 of which are the same, and 8 output tokens
      When the server steps once
      And the model fails in its next pass, half-way
      And the server steps until it has no work
      Then every answer is what transformers generates, token for token
      And one pass failed

    @R10.1
    Scenario: A device that is gone fails every request, and no block leaks
      Given the model "qwen3"
      And a server with 32 blocks of 8 tokens that shares prefixes
      And 4 requests of 20 prompt tokens, the first 16 of which are the same, and 8 output tokens
      And the model fails half-way in every pass
      When the server steps until it has no work
      Then every request failed
      And every block is free
      When the fault is over
      And a request "after" comes with the prompt of "request-0" and 8 output tokens
      And the server steps until it has no work
      Then "after" got what transformers generates, token for token

  Rule: Faults can be put into any run from the command line

    @R10.1
    Scenario: A run with faults ends, says what failed, and leaks nothing
      When I run "debug=faults debug.faults.rate=0.1 scheduler.max_batch_size=2 workload.num_requests=12" on a tiny model
      Then the command succeeds
      And some passes failed, some requests failed and the others completed
      And no block leaked
