Feature: Why did my request take so long
  A run's requests are followed once more: what each waited for, whose prompts were in its steps, what of its prompt
  was computed and why, and what would have helped.

  Rule: A request's time is terms that sum to it

    @R27.5
    Scenario: All requests of a simulated run, and the slowest
      Given a run of "executor=simulated hardware=h100_sxm executor.timing=roofline kv.num_blocks=8 model.max_seq_len=128 workload.num_requests=9 workload.arrival=burst"
      When I explain it with "slowest=3" and a picture
      Then the command succeeds
      And the message says "9 requests on simulated h100_sxm"
      And the message says "waited: too few blocks were free"
      And 3 requests are named as the slowest, and a picture of the first was drawn

    @R27.5
    Scenario Outline: One request of a run that <what>
      Given a run of "<settings>"
      When I explain it with "request=r3"
      Then the command succeeds
      And the terms of r3 sum to its time in the run, and those to its first token to that
      And what became of its prompt's tokens sums to its length

      Examples:
        | what                         | settings |
        | was simulated                | executor=simulated hardware=h100_sxm executor.timing=roofline |
        | computed its steps           | scheduler.max_batch_size=2 |
        | guessed tokens ahead         | scheduler.speculation.method=ngram workload.output_len={min:16,max:16} |
        | had a front end before it    | executor=simulated hardware=h100_sxm executor.timing=roofline framework.request_us=900 |
        | forked samples from a prompt | workload=parallel_sampling |

    @R27.5
    Scenario: Who held the blocks that it waited for
      Given a run of "executor=simulated hardware=h100_sxm executor.timing=roofline kv.num_blocks=4 model.max_seq_len=64 workload.num_requests=6 workload.arrival=burst"
      When I explain it with "request=r4"
      Then the message says "the blocks it waited for were held by r"

  Rule: Of a fleet it follows a request from replica to replica

    @R28.16
    Scenario Outline: One request of replicas <that>
      Given a run of "executor=simulated hardware=h100_sxm executor.timing=roofline kv.num_blocks=64 workload.num_requests=8 <settings>"
      When I explain it with "request=r3 changes=false"
      Then the command succeeds
      And the terms of r3 sum to its time in the run, and those to its first token to that
      And its ways and their scores are those of the run's routes.parquet
      And the message says "<message>"

      Examples:
        | that              | settings | message |
        | of two groups     | fleet.router=least_requests fleet.groups=[{count:1},{count:1,hardware:l4}] | to replica 1, l4; scores 1: 1, 0: 2 |
        | that are split    | fleet.replicas=3 fleet.prefill=1 fleet.router=load fleet.link.setup_us=9000 | its prompt to replica 0; scores 0: ... with its prompt computed to replica ... pulled K and V from another replica |
        | that decode first | fleet.replicas=3 fleet.prefill=1 fleet.handshake=decode_first fleet.link.setup_us=9000 | for blocks of its prompt to replica ... its prompt to replica 0 ... pulled K and V from another replica |
        | of which one dies | fleet.replicas=2 fleet.life=[0.0001:die:1] | to replica 1 ... to replica 0 ... lost with a replica that died |
        | that pull prefixes | fleet.replicas=4 fleet.neighbours=true fleet.pull=always workload.arrival=uniform workload.rate=4 workload.group_len=16 | 16 tokens pulled from replica ... pulled K and V from another replica |

    @R28.16
    Scenario: What the requests of each group took
      Given a run of "executor=simulated hardware=h100_sxm executor.timing=roofline kv.num_blocks=64 workload.num_requests=5 fleet.groups=[{count:1},{count:1,name:small,scheduler.max_batch_size:1}]"
      When I explain it with "slowest=0 figure=null"
      Then the message says "h100_sxm (3) ... decoding ... small (2) ... waited: enough sequences ran"

    @R28.16
    Scenario: Replicas that computed here
      Given a run of "workload.num_requests=2 kv.num_blocks=16 fleet.replicas=2"
      When I explain it with "request=r1"
      Then the command fails without a traceback
      And the message says "was computed here by 2 replicas; only simulated ones are explained together"

  Rule: Why tokens of a prompt were computed

    @R27.6
    Scenario Outline: Of prompts that <what>
      Given a run of "executor=simulated hardware=h100_sxm executor.timing=roofline <settings>"
      When I explain it with "slowest=0"
      Then the message says "<message>"

      Examples:
        | what                      | settings | message |
        | begin alike               | workload=shared_prefix model.max_seq_len=1024 workload.prompt_len=10 | found in the prefix cache |
        | part after a while        | workload=shared_prefix model.max_seq_len=1024 workload.prompt_len=40 | behind the block where it diverged from earlier prompts |
        | share nothing by setting  | kv=paged_unshared | 100.0 % not shared |
        | were evicted              | workload=multi_turn model.max_seq_len=2048 kv.num_blocks=128 workload.num_requests=24 workload.prompt_len=100 workload.concurrency=6 | had been cached, and was evicted |

    @R27.10
    Scenario Outline: A run that <what> counts them itself
      Given a run of "figures=true <settings>"
      Then its metrics of computed prompt tokens are those that explaining it gives, <some> among them

      Examples:
        | what               | some     | settings |
        | was simulated      | evicted  | executor=simulated hardware=h100_sxm executor.timing=roofline framework.request_us=900 workload=multi_turn model.max_seq_len=2048 kv.num_blocks=128 workload.num_requests=24 workload.prompt_len=100 workload.concurrency=6 |
        | computed its steps | diverged | workload=shared_prefix model.max_seq_len=1024 workload.prompt_len=40 workload.num_requests=6 |

  Rule: What would have helped

    @R27.5
    Scenario: With one thing changed, simulated again
      Given a run of "executor=simulated hardware=h100_sxm executor.timing=roofline kv.num_blocks=8 model.max_seq_len=128 workload.num_requests=9 workload.arrival=burst"
      When I explain it with "request=r8"
      Then the message says "kv.num_blocks=16"
      And with it r8 took what it takes in a run with "kv.num_blocks=16"
      And the message says "half as many requests"

    @R29.27
    Scenario: How near ratios of simulated runs were to measured ones stands behind the changes
      Given the tables of measured operations
      And a run of "executor=simulated hardware=h100_sxm executor.timing=silicon executor.dtype=bfloat16 model=qwen3_8b kv.num_blocks=8 model.max_seq_len=128 workload.num_requests=9 workload.arrival=burst"
      When I explain it with "request=r8"
      Then the message says "half as many requests"
      And the message says "pairs of measured vllm deployments of dense models half had their ratio predicted within"

    @R27.13
    Scenario: A run that computed its steps is simulated by their times
      Given a run of "scheduler.max_batch_size=1 workload.num_requests=16"
      When I explain it with "request=r9"
      Then the message says "timed by its own steps, the run as it was takes"
      And "scheduler.order=shortest_first" is simulated, unless that is too far off

    @R27.13
    Scenario: A run of too few steps to fit times to
      Given a run of "scheduler.max_batch_size=2"
      When I explain it with "request=r1"
      Then the message says "what would have helped is not known: "
      And the message says "a calibration needs 50 or more"

  Rule: What another server did is held against a simulation

    @R27.12
    Scenario: The slowest requests of a recorded trace
      Given a trace of 12 requests that a server recorded
      When I explain the trace with "executor=simulated hardware=h100_sxm executor.timing=roofline model=llama3_1_8b slowest=10" and a picture
      Then the command succeeds
      And the message says "the simulation takes"
      And the message says "finds 176 tokens in the prefix cache where the server said 176"
      And the message says "not explained by the simulation"
      And 10 requests of the trace are named, and the terms of each sum to what was recorded

    @R27.12
    Scenario: One of them, and what would have helped
      Given a trace of 12 requests that a server recorded
      When I explain the trace with "executor=simulated hardware=h100_sxm executor.timing=roofline model=llama3_1_8b request=r3"
      Then the message says "first token after 43.0 ms"
      And the message says "half as many requests"

    @R27.12
    Scenario Outline: A trace with <what> is refused
      Given a trace of <trace>
      When I explain the trace with "<settings>"
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | what                        | trace                                | settings | message |
        | settings of no simulation   | 12 requests that a server recorded   | slowest=3 | executor.kind=torch: is not simulated; say what the server ran on, as executor=simulated hardware=h100_sxm |
        | no times of requests        | 12 requests that nobody timed        | executor=simulated hardware=h100_sxm | does not say how long requests took (e2el_ms), as kvlab record does |
        | a request that is none      | 12 requests that a server recorded   | executor=simulated hardware=h100_sxm executor.timing=roofline request=r77 | request=r77: is none of the 12 requests of which the trace says how long they took |
        | no file                     | 12 requests that a server recorded   | executor=simulated hardware=h100_sxm trace=nowhere | trace=nowhere: cannot be read: No such file |
        | an unknown setting          | 12 requests that a server recorded   | executor=simulated hardware=h100_sxm slowst=3 | slowst |
        | a run beside it             | 12 requests that a server recorded   | run=there | is beside run=; name one of them |

  Rule: What cannot be explained is refused in a sentence

    @R27.5
    Scenario Outline: It refuses <what>
      Given a run of "scheduler.max_batch_size=2"
      When I explain it with "<settings>"
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | what                     | settings     | message |
        | a request that is none   | request=r77  | request=r77: is none of the run's 4 requests, such as r0, r1, r2 |
        | an unknown setting       | requst=r1    | did you mean request? |
        | a picture without a kind | figure=a     | figure=a: a picture's name ends in .png, .svg, .pdf |
        | a run that is none       | run=nowhere  | run=nowhere: is no output directory |

    @R27.5
    Scenario: It refuses a run that another version made
      Given a run of "executor=simulated hardware=h100_sxm executor.timing=roofline"
      But a request of it ended at another time
      When I explain it with "request=r1"
      Then the command fails without a traceback
      And the message says "is not what its settings give here"
