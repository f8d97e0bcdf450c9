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

    @R15.1
    Scenario: BurstGPT's requests arrive as they did, but for those that failed
      Given a trace
        """
        Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
        5,ChatGPT,20,5,25,Conversation log
        5.05,GPT-4,4,0,4,API log
        5.2,ChatGPT,33,3,36,Conversation log
        """
      When I run "workload=burstgpt" on that trace
      Then the command succeeds
      And the requests arrived at 0, 0.2 s with prompts of 20, 33 and outputs of 5, 3 tokens
      And nothing is said of "refused"

    @R15.1
    Scenario: ShareGPT's lengths, which have no times, come all at once or at a rate
      Given a trace
        """
        num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
        20,5,25,4.0
        33,3,36,11.0
        """
      When I run "workload=sharegpt_lengths" on that trace
      Then the command succeeds
      And the requests arrived at 0, 0 s with prompts of 20, 33 and outputs of 5, 3 tokens
      When I run "workload=sharegpt_lengths workload.arrival=uniform workload.rate=10" on that trace
      Then the requests arrived at 0, 0.1 s with prompts of 20, 33 and outputs of 5, 3 tokens

    @R15.1
    Scenario: vLLM's timed traces have seconds and blocks of 16 tokens
      Given a trace
        """
        {"timestamp": 10, "input_length": 48, "output_length": 2, "hash_ids": [0, 1, 2]}
        {"timestamp": 10.1, "input_length": 40, "output_length": 3, "hash_ids": [0, 1, 3]}
        """
      When I run "workload=timed_trace" on that trace
      Then the command succeeds
      And the requests arrived at 0, 0.1 s with prompts of 48, 40 and outputs of 2, 3 tokens
      And the requests found 0, 32 tokens of their prompts in the cache

    @R15.3
    Scenario: A share of a trace's requests, each as it was
      Given a trace of 40 requests, one every 0.01 s
      When I run "workload=azure workload.sample=0.5" on that trace
      Then the command succeeds
      And between 10 and 30 of its requests were served, each at its time and with its length
      When I run "workload=azure workload.sample=0.2" on that trace
      Then those that were served are a part of those before

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

  Rule: Arrivals are as they are asked for

    @R15.3
    Scenario Outline: <arrivals>
      When I run "executor=simulated hardware=l4 workload.num_requests=400 workload.output_len.min=1 workload.output_len.max=1 <settings>" on a tiny model
      Then the command succeeds
      And the gaps between its arrivals have a mean of <mean> s, and a deviation of <deviation> s

      Examples:
        | arrivals              | settings                                                            | mean | deviation |
        | all at once           | workload.arrival=burst                                              | 0    | 0         |
        | evenly                | workload.arrival=uniform workload.rate=10                           | 0.1  | 0         |
        | as a Poisson process  | workload.arrival=poisson workload.rate=10                           | 0.1  | 0.1       |
        | in bursts and lulls   | workload.arrival=gamma workload.rate=10 workload.burstiness=0.25    | 0.1  | 0.2       |

    @R15.3
    Scenario: The next request arrives when one has ended
      When I run "workload.concurrency=1 scheduler.max_batch_size=4" on a tiny model
      Then the command succeeds
      And each request arrived when the one before it had ended

  Rule: A dry run shows a workload and serves nothing

    @R15.4 @tracked
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
      And the message says "hit rate without a memory limit: 23.5 % of prompt tokens; higher only by answers that later prompts repeat"
      And a picture of it is all that the run left, and nothing was tracked

    @R15.4
    Scenario Outline: What prompts share is not claimed of a trace that has their lengths alone: <workload>
      Given a trace
        """
        <header>
        <first>
        <second>
        """
      When I run "workload=<workload> dry_run=true" on that trace
      Then the command succeeds
      And the message says "prompt blocks: 3 of 16 tokens"
      And the message says "hit rate without a memory limit: unknown: workload=<workload> has the lengths of prompts, and not what they begin with"
      And nothing is said of "answers that later prompts repeat"
      And nothing is said of "0.0 %"

      Examples:
        | workload         | header                                                                | first                            | second                      |
        | azure            | TIMESTAMP,ContextTokens,GeneratedTokens                               | 2023-11-16 18:15:46.0,20,5       | 2023-11-16 18:15:46.5,33,3  |
        | burstgpt         | Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type  | 5,ChatGPT,20,5,25,log            | 6,ChatGPT,33,3,36,log       |
        | sharegpt_lengths | num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio        | 20,5,25,4.0                      | 33,3,36,11.0                |

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
