Feature: Traffic
  Recorded traffic and arrival processes are workloads like any other.

  Rule: A trace is served as it was recorded

    @R15.1
    Scenario: A chat service's requests arrive as they did, with the lengths they had
      Given a trace
        """
        TIMESTAMP,ContextTokens,GeneratedTokens
        2023-11-16 18:15:46.6805900,20,5
        2023-11-16 18:15:46.7805900,33,3
        2023-11-16 18:15:46.8805900,8,4
        """
      When I run "workload=azure" on that trace
      Then the command succeeds
      And the requests arrived at 0, 0.1, 0.2 s with prompts of 20, 33, 8 and outputs of 5, 3, 4 tokens

    @R15.1
    Scenario: Prompts share the blocks whose ids are equal
      Given a trace
        """
        {"timestamp": 0, "input_length": 48, "output_length": 2, "hash_ids": [0, 1, 2]}
        {"timestamp": 100, "input_length": 40, "output_length": 2, "hash_ids": [0, 1, 3]}
        {"timestamp": 200, "input_length": 48, "output_length": 2, "hash_ids": [4, 5, 6]}
        """
      When I run "workload=mooncake workload.block_tokens=16" on that trace
      Then the command succeeds
      And the requests found 0, 32, 0 tokens of their prompts in the cache

    @R15.3
    Scenario: A window of a trace, at twice the rate
      Given a trace
        """
        TIMESTAMP,ContextTokens,GeneratedTokens
        2023-11-16 18:15:46.0,20,5
        2023-11-16 18:15:47.0,33,3
        2023-11-16 18:15:47.2,8,4
        2023-11-16 18:15:49.0,21,4
        """
      When I run "workload=azure workload.window=1-3 workload.rate_scale=2" on that trace
      Then the command succeeds
      And the requests arrived at 0, 0.1 s with prompts of 33, 8 and outputs of 3, 4 tokens

  Rule: Requests may come in a closed loop

    @R15.3
    Scenario: The next request arrives when one has ended
      When I run "workload.concurrency=1 scheduler.max_batch_size=4" on a tiny model
      Then the command succeeds
      And each request arrived when the one before it had ended

  Rule: A dry run shows a workload and serves nothing

    @R15.4
    Scenario: Lengths, arrivals and what prompts share
      Given a trace
        """
        {"timestamp": 0, "input_length": 48, "output_length": 2, "hash_ids": [0, 1, 2]}
        {"timestamp": 100, "input_length": 40, "output_length": 4, "hash_ids": [0, 1, 3]}
        {"timestamp": 200, "input_length": 48, "output_length": 6, "hash_ids": [4, 5, 6]}
        """
      When I run "workload=mooncake workload.block_tokens=16 dry_run=true" on that trace
      Then the command succeeds
      And the message says "prompt, tokens ... 45 ... 40 ... 48 ... output, tokens ... 4 ... 2 ... 6"
      And the message says "arrivals: within 0.2 s, 15.00 per s"
      And the message says "prompt blocks: 8 of 16 tokens, 6 distinct"
      And the message says "blocks that occur before: 25.0 %"
      And the message says "tree of prefixes: 3 blocks deep, shared down to 2"
      And the message says "hit rate without a memory limit: 23.5 % of prompt tokens"
      And a picture of it is all that the run left, and nothing was tracked

    @R15.4
    Scenario: A sweep has no dry run
      When I sweep "dry_run=true seed=1,2" on a tiny model
      Then the command fails without a traceback
      And the message says "dry_run=true: shows the workload of one run; leave out -m, sweep= and repeats="

  Rule: A file that is no such trace is refused with line and column

    @R15.2
    Scenario Outline: Something is wrong in line 3
      Given a trace
        """
        TIMESTAMP,ContextTokens,GeneratedTokens
        2023-11-16 18:15:46.6805900,20,5
        <line>
        """
      When I run "workload=azure" on that trace
      Then the command fails without a traceback
      And the message says "trace, line 3<message>"

      Examples:
        | line                           | message                                                                         |
        | 2023-11-16 18:15:47,20,five    | , column GeneratedTokens: 'five'; expected a whole number of tokens, from 1     |
        | 2023-11-16 18:15:47,0,5        | , column ContextTokens: 0; expected a whole number of tokens, from 1            |
        | yesterday,20,5                 | , column TIMESTAMP: 'yesterday'; expected a date and time such as 2023-11-16    |
        | 2023-11-16 18:15:47,20         | , column GeneratedTokens: is missing; expected 3 columns as in the first line   |
        | 2023-11-16 18:15:47,20,5,5     | : 4 columns; expected 3 as in the first line                                    |
        | 2023-11-16 18:15:40,20,5       | , column TIMESTAMP: the time goes backwards: -6.68059 s after the start         |

    @R15.2
    Scenario: A trace of another format
      Given a trace
        """
        Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
        5,ChatGPT,472,18,490,Conversation log
        """
      When I run "workload=azure" on that trace
      Then the command fails without a traceback
      And the message says "line 1: ... workload=azure expects the columns TIMESTAMP ... workload=burstgpt reads this one"
