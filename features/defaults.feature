Feature: Right by default
  What a newcomer types is answered as the system that it stands for would, or the output says otherwise.

  Rule: A simulated server has the settings that its framework's server has on that device

    @R23.10
    Scenario Outline: framework=<framework> <settings>: steps are decided as that framework decides them
      When I run "hardware=h100_sxm framework=<framework> <settings> verbose=true kv.memory=1MiB figures=false" on a tiny model
      Then the command succeeds
      And the message says "<message>"

      Examples:
        | framework        | settings                                            | message                                                                                             |
        | vllm             |                                                     | order=fcfs ... ahead=True ... aging_s=60.0 ... admission_reserve=0.0 ... reserve_output=-           |
        | vllm             | scheduler.order=priority                            | order=priority ... ahead=True ... aging_s=- ... admission_reserve=0.0 ... reserve_output=-          |
        | vllm             | framework.version=0.19.0                            | reserve_prompt=True ... reserve_output=-                                                            |
        | vllm             | framework.version=0.14.0                            | ahead=True ... reserve_prompt=False                                                                 |
        | vllm             | framework.version=0.13.0                            | ahead=False ... reserve_prompt=False ... framework.version=0.13.0 is of a vLLM that scheduled a step when the one before had ended, and took longer to: framework=vllm_synchronous has its times of the host |
        | vllm             | framework.version=0.18.1                            | reserve_prompt=False ... reserve_output=-                                                           |
        | vllm_synchronous |                                                     | order=fcfs ... ahead=False ... reserve_prompt=False ... reserve_output=-                            |
        | sglang           |                                                     | order=prefill_alone ... ahead=True ... admission_reserve=0.0 ... reserve_output=True ... conservativeness=1.0 |
        | sglang           | scheduler.order=fcfs scheduler.reserve_output=false | order=fcfs ... ahead=True ... admission_reserve=0.0 ... reserve_output=False ... conservativeness=- |
        | sglang           | scheduler=static                                    | policy=static order=fcfs ... reserve_output=True ... conservativeness=-                             |
        | trtllm           |                                                     | order=fcfs ... chunk_unit=32 ... ahead=True ... admission_reserve=0.0 ... reserve_output=True ... conservativeness=- |
        | trtllm           | kv.block_size=64                                    | chunk_unit=64 ...                                                                                   |
        | trtllm           | scheduler=static                                    | policy=static ... chunk_unit=- ...                                                                  |
        | kvlab            | scheduler.order=priority                            | order=priority ... ahead=False ... aging_s=60.0 ... admission_reserve=0.2 ... reserve_output=-      |

    @R23.1
    Scenario Outline: <settings>: whose defaults they are stands beside the run
      When I run "executor=simulated kv.memory=1MiB figures=false <settings>" on a tiny model
      Then the command succeeds
      And the message says "<message>"

      Examples:
        | settings                                           | message                                                                                                     |
        | hardware=h100_sxm                                  | vllm with steps of up to 8,192 tokens and 1,024 sequences (vLLM 0.33's server by default), up to 64 tokens  |
        | hardware=a100_sxm                                  | vllm with steps of up to 2,048 tokens and 256 sequences (vLLM 0.33's server by default)                     |
        | hardware=b200_sxm                                  | vllm with steps of up to 16,384 tokens and 1,024 sequences (vLLM 0.33's server by default)                  |
        | hardware=b200_sxm framework.version=0.27.1         | vllm with steps of up to 8,192 tokens and 1,024 sequences (vLLM 0.27.1's server by default)                 |
        | hardware=l40s framework=sglang                     | sglang with steps of up to 4,096 tokens and 2,048 sequences (SGLang 0.5.23's server by default)             |
        | hardware=h200_sxm framework=trtllm                 | blocks of 32 tokens ... trtllm with steps of up to 8,192 tokens and 2,048 sequences (TensorRT-LLM's server by default) ... prompts in chunks (of a server with enable_chunked_prefill, which is off by default) |
        | hardware=h200_sxm framework=trtllm scheduler.chunk_unit=9000 | (TensorRT-LLM's server by default), up to 64 tokens each; |
        | hardware=h100_sxm scheduler.max_batch_size=64      | 8,192 tokens and 64 sequences (vLLM 0.33's server by default: 8,192 and 1,024)                              |
        | hardware=h100_sxm scheduler.max_batched_tokens=700 | 700 tokens and 700 sequences (vLLM 0.33's server by default: 8,192 and 1,024)                               |
        | hardware=h100_sxm framework=kvlab                  | kvlab with steps of up to 512 tokens and 48 sequences, up to 64 tokens each                                 |

    @R23.11
    Scenario Outline: framework=<framework> <settings>: of groups of devices each has its own limits of a step
      When I run "executor=simulated executor.dtype=bfloat16 hardware=h200_sxm model=qwen3_30b_a3b framework=<framework> executor.attention_data_parallel=2 executor.expert_parallel=2 executor.timing=roofline kv.memory=8GiB verbose=true figures=false <settings>" on a tiny model
      Then the command succeeds
      And the message says "<message>"

      Examples:
        | framework | settings                          | message                                                                                                                                                                                                      |
        | vllm      |                                   | max_batch_size=2048 ... max_batched_tokens=16384 ... long_prefill_threshold=8192 ... 16,384 tokens and 2,048 sequences of all 2 groups of devices together (vLLM                                                        |
        | vllm      | scheduler.max_batch_size=128      | 16,384 tokens and 128 sequences of all 2 groups of devices together ... warning: scheduler.max_batch_size=128 is of all 2 groups of devices together; where it is vllm's limit of each, it is scheduler.max_batch_size=256 |
        | trtllm    | scheduler.max_batched_tokens=4096 | long_prefill_threshold=2048 ... warning: scheduler.max_batched_tokens=4096 is of all 2 groups of devices together; where it is trtllm's limit of each, it is scheduler.max_batched_tokens=8192                 |
        | sglang    |                                   | max_batch_size=2048 ... long_prefill_threshold=4096 ... 8,192 tokens and 2,048 sequences of all 2 groups of devices together (SGLang 0.5.23's server by default)                                                               |

    @R23.1
    Scenario: Without measured operations the roofline is taken, and why stands beside the run
      When I run "executor=simulated hardware=l4 kv.memory=1MiB figures=false" on a tiny model
      Then the command succeeds
      And the message says "timing roofline: no operations were measured: "

  Rule: A run that falls behind its requests says so

    @R23.2
    Scenario Outline: <rate> requests a second, one at a time
      When I run "executor=simulated hardware=l4 kv.memory=1MiB scheduler.max_batch_size=1 workload.num_requests=100 workload.arrival=poisson workload.rate=<rate> figures=false" on a tiny model
      Then the command succeeds
      And the message says "<message>"

      Examples:
        | rate | message                                                                                                                              |
        | 400  | overloaded: ... requests a second offered, ... served; ... in the engine at the last arrival, ... holds: kvlab tune find=rate ... offered ... served   |
        | 3    | on simulated l4 ... offered ... served                                                                                               |

  Rule: A setting without effect is named

    @R23.3
    Scenario Outline: <setting> is read by another choice
      When I run "<setting> figures=false" on a tiny model
      Then the command succeeds
      And the message says "warning: <setting> has no effect here: it is read by <by>"

      Examples:
        | setting                             | by                            |
        | workload.rate=2.0                   | workload.arrival=poisson      |
        | scheduler.max_wait_ms=5.0           | scheduler=static              |
        | scheduler.default_deadline_s=7.0    | scheduler.order=deadline      |
        | workload.think_s=2.0                | workload.turns of 2 or more   |
        | executor.memory_utilization=0.5     | executor=simulated            |
        | framework.version=0.11.0            | simulated devices             |
        | optimize=latency/ttft_ms_p50        | sweeps (-m, sweep=)           |

    @R23.3
    Scenario: Windows of a model that has none
      When I run "kv.windows=false figures=false" on a tiny model
      Then the command succeeds
      And the message says "warning: kv.windows=False has no effect here: no layer of qwen3_tiny has a sliding window"

    @R23.3
    Scenario Outline: <setting> is of another view, rule or device
      When I run "executor=simulated hardware=h100_sxm kv.num_blocks=64 workload.num_requests=4 <with> <setting> figures=false" on a tiny model
      Then the command succeeds
      And the message says "warning: <setting> has no effect here: it is read by <by>"

      Examples:
        | with                                  | setting                     | by                                                |
        | fleet.replicas=2                      | fleet.load_s=3.0            | a router whose view of load is polled             |
        | fleet.replicas=2                      | fleet.prefixes=events       | the routers cache_aware, precise                  |
        | fleet.replicas=2 fleet.router=precise | fleet.memory_blocks=3       | a router that remembers what it sent              |
        | fleet.replicas=2 fleet.router=load    | fleet.weights.prefix=2.0    | a router that sees prefixes                       |
        | fleet.replicas=2                      | fleet.link.gb_s=3.0         | fleet.prefill of 1 or more                        |
        | fleet.replicas=2                      | fleet.scale.warm_up_s=3.0   | fleet.scale.on                                    |
        |                                       | hardware.host_link_gb_s=3   | kv.offload                                        |
        | fleet.replicas=2 fleet.prefill_scale.on=rate | fleet.prefill_scale.target=9.0 | fleet.prefill_scale.on, with fleet.prefill of 1 or more |
        | fleet.replicas=2 fleet.router=precise fleet.prefixes=none | fleet.weights.prefix=2.0 | a router that sees prefixes              |
        | fleet.replicas=2 fleet.router=precise fleet.prefixes=none fleet.store=1MiB | fleet.store_weight=0.5 | fleet.store, with a router that sees prefixes |
        |                                       | executor.threads=2          | executors that compute                            |
        | executor.timing=roofline              | hardware.link_gb_s=9        | executor.tensor_parallel of 2 or more             |
        |                                       | executor.timing_path=x      | executor=simulated executor.timing=fitted         |

  Rule: A key that is not there is answered with the one that was meant

    @R23.4
    Scenario Outline: <override>
      When I run "<override>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | override                  | message                                                                                            |
        | kv.blocksize=16           | kv.blocksize=16: unknown; did you mean kv.block_size?                                              |
        | scheduler.max_num_seqs=4  | scheduler.max_num_seqs=4: unknown; did you mean scheduler.max_batch_size?                          |
        | gpu_memory_utilization=1  | gpu_memory_utilization=1: unknown; did you mean executor.memory_utilization?                       |
        | parallelism.tensor=4      | parallelism.tensor=4: unknown; did you mean executor.tensor_parallel?                              |
        | qps=4                     | qps=4: unknown; did you mean workload.rate?                                                        |
        | tensor_parallel=4         | tensor_parallel=4: unknown; did you mean executor.tensor_parallel?                                 |
        | data_parallel=4           | data_parallel=4: unknown; did you mean fleet.replicas?                                             |
        | devices=4                 | devices=4: unknown to this command; it is a setting of kvlab advise; a replica has executor.tensor |
        | pipeline_parallel=2       | pipeline_parallel=2: unknown: layers are not divided into stages                                   |
        | workload.prompt_len=1e3   | workload.prompt_len=1e3: must be a whole number of tokens from 1 on, as workload.prompt_len=2000   |
        | chunked_prefill_size=4    | chunked_prefill_size=4: unknown; did you mean scheduler.max_batched_tokens?                        |
        | num_blocks=4              | num_blocks=4: unknown; did you mean kv.num_blocks?                                                 |
        | port=8001                 | port=8001: unknown to this command; it is a setting of kvlab serve: server.port                    |
        | scheduler.preemption=swap | scheduler.preemption=swap: has settings of its own: scheduler.preemption.victim, scheduler.        |
        | kv.dtype=fp8              | kv.dtype=fp8: which one? fp8_e4m3 (4 bits of exponent, 3 of mantissa) or fp8_e5m2                  |

    @R23.9
    Scenario Outline: <words>
      When I run "<words> kv.num_blocks=64 model.max_seq_len=64 workload.num_requests=2 figures=false" on a tiny model
      Then the command succeeds
      And the message says "<message>"

      Examples:
        | words                                                    | message                                                         |
        | hardware=l4                                              | executor=simulated ... on simulated l4                          |
        | hardware=H100-SXM model=qwen3-8b                         | qwen3_8b: 8,191 M parameters ... on simulated h100_sxm          |
        | hardware=h100_sxm model=Qwen/Qwen3-8B                    | qwen3_8b: 8,191 M parameters ... on simulated h100_sxm          |
        | hardware=l40s model=meta-llama/Llama-3.1-8B-Instruct     | llama3_1_8b: 8,030 M parameters ... on simulated l40s           |
        | fleet.groups=[{count:2,hardware:l4}]                     | on simulated 2 of l4                                            |

    @R23.9
    Scenario: A run takes a model by its directory
      Given a directory with the config.json of "qwen3_tiny"
      When I run "hardware=l4 kv.num_blocks=64 model.max_seq_len=64 workload.num_requests=2 figures=false" on the model of that directory
      Then the command succeeds
      And the message says "qwen3_tiny's model, v=1: ... on simulated l4"

    @R23.4
    Scenario: A length is a number of tokens
      When I run "workload.prompt_len=20 workload.output_len=7" on a tiny model
      Then the command succeeds
      And the run has 80 prompt tokens and 28 output tokens

  Rule: A run says what is needed, and all of it when it is asked

    @R23.6
    Scenario Outline: Settings and figures with verbose=<verbose>
      When I run "verbose=<verbose> figures=false" on a tiny model
      Then the command succeeds
      And the message says "<message>"

      Examples:
        | verbose | message                                                                                 |
        | false   | kv=paged scheduler=continuous ... (verbose=true: every setting) ... output tokens        |
        | true    | admission_reserve=0.2 ... preemptions │ 0 ... failed │ 0                                 |

  Rule: Runs are told apart

    @R23.7
    Scenario: A run without a name has one that says what was set
      When I run "workload.num_requests=2 scheduler.max_batch_size=3 figures=false" on a tiny model
      Then the command succeeds
      And the message says "num_requests=2 max_batch_size=3"

    @R23.7
    Scenario: A directory that holds a run is not taken by another
      When I run "figures=false" on a tiny model into the directory "mine"
      And I run "figures=false" on a tiny model into the directory "mine"
      Then the command fails without a traceback
      And the message says "hydra.run.dir=...mine: holds a run; name another directory, or move that one away"
