Feature: Advice
  What to change, from traffic and today's settings: simulated, with what it gains, how sure that is, and what it costs.

  Background:
    Given a laboratory with a store of its own

  @R30.1 @R30.3 @R30.5
  Scenario: A prefix cache that is off
    When I ask for advice on "workload.system_len=4000 workload.num_requests=20 kv.prefix_sharing=false keep=[executor,scheduler,kv.block_size]"
    Then it ends with status 0
    And the first advice is "kv.prefix_sharing=true"
    And each change has its gain on both parts, what it costs, and a command that tries it
    And the plan is better on both parts than today's settings
    And of what a prefix cache could find it says "0.0 % of 9"

  @R30.2
  Scenario: Nothing to change
    When I ask for advice on "workload.num_requests=24 workload.rate=0.5 slo.ttft_ms=2000 slo.tpot_ms=200"
    Then it ends with status 0
    And it says "Change nothing: of"
    And the first advice is "change nothing"
    When I ask for advice on "workload.num_requests=24 workload.rate=0.5 slo.ttft_ms=2000 slo.tpot_ms=200 devices=2 price_per_hour=1 keep=[executor.dtype,executor.weights,kv,scheduler]"
    Then it says "Change nothing: of"
    And it says "1 device at 19.07 a million output tokens would keep the limits as well"

  @R30.4 @R30.15
  Scenario: The same command again
    When I ask for advice on "workload.num_requests=24 scheduler.max_batch_size=2 keep=[executor,kv,scheduler.max_batched_tokens]"
    And I ask for the same advice again, without what was kept, and by a launcher
    Then all of it is the same, and the second simulated no change again

  @R30.3
  Scenario: A trace is cut in the middle of its time
    Given a recorded trace of 44 requests over 22 seconds
    When I ask for advice on the trace with "scheduler.max_batch_size=1 keep=[executor,kv]"
    Then it ends with status 0
    And it was chosen on requests of the first 11 seconds, and reported on those behind

  @R30.6 @R30.11
  Scenario: Devices and their price
    When I ask for advice on "workload.num_requests=24 workload.rate=30 model=llama3_1_8b hardware=l40s devices=4 price_per_hour=2 budget_per_hour=5 slo.ttft_ms=2000 keep=[executor.dtype,executor.weights,kv,scheduler]"
    Then it ends with status 0
    And no plan takes more than 2 devices
    And the price of a million tokens is that of its devices over its tokens
    And it is said of today's settings and of each number of devices

  @R30.13 @R30.14
  Scenario: Replicas whose prefixes a router scatters
    When I ask for advice on "workload=shared_prefix workload.num_groups=6 workload.group_len=2000 workload.num_requests=24 fleet.replicas=2 workload.output_len.max=12 workload.output_len.min=4 keep=[executor,kv,scheduler]"
    Then it ends with status 0
    And prefixes from neighbours and a shared store are among what was tried
    And what the time of requests went into sums to all of it
    And it says "not tried: scheduler.speculation.method: how many of the tokens that it proposes a model keeps depends"
    And it says "not tried: fleet.groups: which replicas to make unlike the others, and how, has no single answer"

  @R30.16
  Scenario: Prefill and decode apart, too few that prefill
    When I ask for advice on "workload.num_requests=20 workload.rate=20 workload.prompt_len=3000 kv.block_size=128 workload.output_len=10 fleet.groups=[{role:prefill,count:1},{role:decode,count:3}] keep=[executor,kv,scheduler.order,scheduler.max_batch_size,scheduler.long_prefill_threshold,fleet.router,fleet.groups.1.scheduler]"
    Then it ends with status 0
    And the first advice is "fleet.groups.0.count=2 fleet.groups.1.count=2"
    And it says "1 less of decode l4, 1 more of prefill l4"
    And it says "worse: fleet.groups.0.scheduler.max_batched_tokens=512"
    And no plan takes more than 4 devices
    And it says "not tried: executor.tensor_parallel, hardware: which groups to have"

  @R30.16
  Scenario: Two kinds of devices, and one more
    When I ask for advice on "workload.num_requests=24 fleet.groups=[{count:2},{count:1,hardware:l40s}] devices=4 executor.timing=roofline keep=[executor,kv,scheduler]"
    Then it ends with status 0
    And it says "on 2 of l4 and 1 of l40s, "
    And the first advice is "fleet.groups.0.count=1 fleet.groups.1.count=3"
    And it says "1 less of l4, 2 more of l40s"
    And the plan is better on both parts than today's settings

  @R30.7
  Scenario: A page, and runs
    When I ask for advice on "workload.num_requests=24 scheduler.max_batch_size=2 keep=[executor,kv]" and track it
    Then it ends with status 0
    And the page has the answer and asks for nothing from elsewhere
    And the store holds the advice with a run for the plan and for each change

  @R30.8
  Scenario Outline: <arguments>
    When I ask for advice on "<arguments>"
    Then it ends with status 2
    And it says "<message>"

    Examples:
      | arguments                                                                 | message                                                                           |
      | workload.num_requests=1                                                   | has 1 request, and fewer than 20 are too few to say anything                      |
      | model=llama3_1_70b devices=1                                              | devices=1: are too few: llama3_1_70b needs                                        |
      | devices=1 fleet.replicas=2                                                | devices=1: allows 1 device, and today's settings take 2 (fleet.replicas=2         |
      | budget_per_hour=5                                                         | budget_per_hour=5.0: needs the price of a device: price_per_hour=                 |
      | budget_per_hour=1 price_per_hour=2                                        | budget_per_hour=1.0: buys no device at price_per_hour=2                           |
      | current=nowhere.yaml                                                      | current=nowhere.yaml: nowhere.yaml cannot be read: No such file or directory      |
      | repeats=3                                                                 | repeats=3: has no place in advice, which makes its own runs                       |
      | keep=kv.dtyp                                                              | keep=kv.dtyp: is none of the settings that advice changes                         |
      | engine=openai engine.url=http://localhost                                 | engine=openai: advice has kvlab's own engine                                      |
      | devices=2 fleet.groups=[{count:2},{count:1}]                              | devices=2: allows 2 devices, and today's settings take 3 (fleet.groups)           |
      | price_per_hour=1 fleet.groups=[{count:1},{count:1,hardware:l40s}]         | price_per_hour=1.0: is of one device, and fleet.groups has l4 and l40s            |
      | workload.num_requests=24 fleet.groups=[{count:1},{count:1,hardware:l40s}] | executor.timing=auto: would time steps of fleet.groups by roofline and by silicon |

  @R29.31
  Scenario: Traffic of words, and a model that has no tokenizer here
    When I ask for advice on "workload=chat workload.num_requests=24 keep=[executor,kv,scheduler]"
    Then it ends with status 0
    And it says "note: prompts have the lengths that kvlab's own tokenizer gives them"
    When I tune in the laboratory "optimize=latency/ttft_ms_p50 trials=1 executor=simulated hardware=l4 workload=chat model.max_seq_len=512 kv.block_size=16"
    Then it ends with status 0
    And it says "prompts have the lengths that kvlab's own tokenizer gives them"

  @R30.8
  Scenario: Service levels that nothing keeps
    When I ask for advice on "workload.num_requests=24 slo.ttft_ms=1 slo.tpot_ms=1 framework.version=0.13.0 framework.expert_kernels=triton keep=[kv,scheduler]"
    Then it ends with status 0
    And it says "note: framework.expert_kernels=triton has no effect here"
    And it says "framework=vllm_synchronous has its times of the host"
    And it names limits that the plan would keep

  @R30.8
  Scenario: Service levels that no change comes near to, of more traffic than is served
    When I ask for advice on "workload.num_requests=24 workload.rate=400 slo.ttft_ms=1 slo.tpot_ms=1 scheduler.max_batch_size=2 keep=[executor,kv]"
    Then it ends with status 0
    And it says "On requests as drawn overloaded: "
    And it says "no change alone brings more requests within the limits: their mean time decides"
    And the plan is better on both parts than today's settings

  @R30.9
  Scenario Outline: The case of <case>
    Then the page of <case> has its commands, what they printed, its pictures, and what one should not conclude
    And what a command prints takes the place of what it printed before

    Examples:
      | case     |
      | mooncake |
      | azure    |
