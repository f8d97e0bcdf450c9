Feature: How many sequences fit
  Before anything is started, the planner says how many sequences a memory holds. It is right to the byte.

  Rule: What is planned is what a server takes

    @R2.1
    Scenario Outline: <model> with kv=<backend> and kv.dtype=<dtype> in 80 MiB
      When I plan "model=<model> memory=80MiB kv.dtype=<dtype> executor=cpu"
      And a server starts with kv=<backend> and the KV memory of the plan
      Then its pool is as planned, and its tensors take the planned bytes
      And less than one block of the 80 MiB is left over

      Examples:
        | model       | backend    | dtype |
        | qwen3_tiny  | paged      | auto  |
        | qwen3_tiny  | contiguous | auto  |
        | qwen3_tiny  | paged      | int8  |
        | gemma3_tiny | paged      | auto  |
        | gemma3_tiny | contiguous | int8  |
        | llama_tiny  | paged      | int8  |
        | qwen3_tiny  | paged      | fp8_e4m3  |
        | qwen3_tiny  | contiguous | int4  |
        | qwen3_tiny  | paged      | int8 kv.value_dtype=int4 |

    @R2.1
    Scenario: Of several simulated replicas one is planned
      When I plan "model=qwen3_8b hardware=h100_sxm fleet.replicas=4"
      Then the planner says "each of 4 replicas, qwen3_8b: "
      When I plan "model=qwen3_8b hardware=h100_sxm fleet.replicas=4 --json"
      Then the planner says ""replicas": 4"
      When I plan "model=qwen3_8b hardware=h100_sxm fleet.groups=[{count:2},{count:1,hardware:h200_sxm}] --json"
      Then the planner says ""replicas": 2"
      And the planner says ""replicas": 1"

    @R2.1
    Scenario: A vLLM whose cache does not hold its longest sequence would not start
      When I plan "model=llama3_1_8b hardware=l4"
      Then the planner says "model.max_seq_len=131072: one sequence of so many tokens needs 16.0 GiB of KV cache, and there are 2.3 GiB: a vLLM server would not start; model.max_seq_len=18864 would (--max-model-len)"
      When I plan "model=llama3_1_8b hardware=l4 model.max_seq_len=18864 --json"
      Then the planner says ""lacking": []"

    @R2.1
    Scenario: Sequences are counted in each group of devices that divides them
      When I plan "model=deepseek_v3 hardware=h200_sxm executor.attention_data_parallel=8 framework=sglang lengths=256"
      Then the planner says "scheduler.max_batch_size=2048 lets 2048 run at once"
      When I plan "model=deepseek_v3 hardware=h200_sxm executor.attention_data_parallel=8 framework=sglang lengths=163840"
      Then 0 contiguous and 0 paged sequences of 163840 tokens fit

    @R29.32
    Scenario Outline: Three of four layers of Qwen3.5 35B-A3B keep a state of a sequence, K and V in <dtype>
      When I plan "model=qwen3_5_35b_a3b hardware=h200_sxm kv.memory=20GiB kv.dtype=<dtype> scheduler.ahead=false lengths=256"
      Then the planner says "30 of 40 layers"
      And a token takes <token> bytes and a block of <tokens> tokens <block>
      And <short> paged sequences of 256 tokens fit, and contiguous slots are not counted
      When I plan "model=qwen3_5_35b_a3b hardware=h200_sxm kv.dtype=<dtype> kv.backend=contiguous"
      Then the message says "kv.backend=contiguous: linear attention of qwen3_5_35b_a3b has a state for each sequence, in a block of its own; use kv.backend=paged"

      Examples: four blocks of a sequence that one block of attention holds
        | dtype    | token | tokens | block    | short |
        | auto     | 20480 | 1088   | 22282240 | 240   |
        | fp8_e4m3 | 10240 | 2112   | 21626880 | 248   |

    @R29.33
    Scenario Outline: 23 of 52 layers of Nemotron 3 Nano have Mamba-2 and 6 have K and V in <dtype>
      When I plan "model=nemotron3_nano_30b_a3b hardware=h200_sxm kv.memory=20GiB kv.dtype=<dtype> scheduler.ahead=false lengths=256"
      Then the planner says "Mamba-2"
      And the planner says "23 of 52 layers"
      And the planner says "6 of 128 experts and shared ones"
      And a token takes <token> bytes and a block of <tokens> tokens <block>
      And <short> paged sequences of 256 tokens fit, and contiguous slots are not counted

      Examples: four groups of states beside one block of attention
        | dtype    | token | tokens | block    | short |
        | auto     | 6144  | 2096   | 12877824 | 333   |
        | fp8_e4m3 | 3072  | 4176   | 12828672 | 334   |

    @R29.32
    Scenario: A server that keeps states apart from blocks is not planned
      When I plan "model=qwen3_5_35b_a3b hardware=h200_sxm framework=sglang"
      Then the command fails without a traceback
      And the message says "framework=sglang: keeps the states of qwen3_5_35b_a3b's linear attention in a pool of their own, which is not planned; framework=vllm is"

    @R29.32
    Scenario: A run of such a model says that a vLLM before 0.26 finds no prefixes, and that none like it was measured
      When I run "model=qwen3_5_27b hardware=h100_sxm executor.weights=fp8 executor.dtype=bfloat16 model.max_seq_len=4096 framework.version=0.25.1" on a tiny model
      Then the message says "linear attention of qwen3_5_27b: vLLM 0.25.1 finds no prefixes of such a model by default; set kv.prefix_sharing=false"
      And the message says "no deployment with linear attention was measured"

    @R2.1
    Scenario: A token costs what its KV heads store, however many query heads read it
      When I plan "model=qwen3_4b memory=16GiB"
      Then the planner says "2 (K and V) x 36 layers x 8 KV heads x 128 numbers x 2 bytes"
      And a token takes 147456 bytes and a block of 16 tokens 2359296

    @R2.1
    Scenario: In int8 a head's scale is counted
      When I plan "model=qwen3_4b memory=16GiB kv.dtype=int8"
      Then the planner says "2 (K and V) x 36 layers x 8 KV heads x (128 numbers x 1 byte + 4 of their scale)"
      And a token takes 76032 bytes and a block of 16 tokens 1216512

    @R2.1
    Scenario: In int4 the scale of every 32 numbers is counted, and K and V may have formats of their own
      When I plan "model=qwen3_4b memory=16GiB kv.dtype=int8 kv.value_dtype=int4"
      Then the planner says "36 layers x 8 KV heads x (K (128 numbers x 1 byte + 4 of their scale) + V (128 numbers x 1/2 byte + 8 of their scales)), int8 and int4"
      And a token takes 58752 bytes and a block of 16 tokens 940032

    @R2.1
    Scenario: In fp8 one scale serves a whole tensor, and the output layer of a model stays as it is
      When I plan "model=qwen3_8b hardware=h100_sxm kv.dtype=fp8_e4m3 executor.weights=fp8"
      Then the planner says "2 (K and V) x 36 layers x 8 KV heads x 128 numbers x 1 byte, fp8_e4m3"
      And the planner says "matrices in fp8 6.5 GiB, output layer in bfloat16 1.2 GiB, embedding 1.2 GiB"
      And a token takes 73728 bytes and a block of 16 tokens 1179648

    @R29.28
    Scenario Outline: In 4 bits <model> takes the bytes of a published format, scales included
      When I plan "model=<model> <settings> executor.dtype=bfloat16"
      Then the planner says "matrices in <matrices>"
      And the planner says "<scales>"

      Examples:
        | model      | settings                                     | matrices                                                                          | scales           |
        | qwen3_8b   | hardware=b200_sxm executor.weights=nvfp4     | nvfp4 (4 bits and a byte of scale for 16, as NVIDIA's checkpoints) 3.2 GiB        | scales 414.0 MiB |
        | qwen3_8b   | hardware=h100_sxm executor.weights=int4_wo   | int4_wo (4 bits and 2 bytes of scale for 128, as GPTQ and AWQ) 3.2 GiB            | scales 103.5 MiB |
        | minimax_m2 | hardware=b200_sxm executor.weights=nvfp4     | bfloat16 and nvfp4 (4 bits and a byte of scale for 16, as NVIDIA's checkpoints)   | scales 13.1 GiB  |
        | kimi_k2_5  | hardware=b200_sxm executor.tensor_parallel=8 | bfloat16 and int4_wo_g32 (4 bits and 2 bytes of scale for 32, as the checkpoint) 506.3 GiB | embedding 2.2 GiB |

    @R29.10
    Scenario: Latents are stored once per layer, whatever the heads, and on every device that shares a sequence
      When I plan "model=deepseek_v3 hardware=h200_sxm executor.dtype=bfloat16 executor.tensor_parallel=8"
      Then the planner says "128 query heads over a latent of 576, 8 of 256 experts and shared ones"
      And the planner says "61 layers x a latent of 576 numbers x 2 bytes, bfloat16; 8 devices have copies"
      And the planner says "671,026,419,200 parameters, matrices in fp8_block"
      And a token takes 562176 bytes and a block of 16 tokens 8994816
      # vLLM's kernels for latents have blocks of their own on a B200.
      When I plan "model=deepseek_v3 hardware=b200_sxm executor.dtype=bfloat16 executor.tensor_parallel=8"
      Then a token takes 562176 bytes and a block of 32 tokens 17989632

    @R29.10
    Scenario: Devices that outnumber a model's KV heads have copies of them, and of what computes them
      When I plan "model=llama3_1_70b hardware=h100_sxm executor.dtype=bfloat16 executor.tensor_parallel=16"
      Then the planner says "80 layers x 8 KV heads x 128 numbers x 2 bytes, bfloat16; 2 devices have copies"
      And the planner says "matrices in bfloat16 132.0 GiB"
      And the planner says "on 16 x h100_sxm: executor.memory_utilization=0.92 of 79.2 GiB each (vLLM 0.33's default), less the working memory of 15 others"
      And a token takes 655360 bytes and a block of 16 tokens 10485760

    @R29.10
    Scenario: A checkpoint in mxfp4 is counted as it is, and blocks that leave a window are given back
      When I plan "model=gpt_oss_120b hardware=h100_sxm executor.dtype=bfloat16"
      Then the planner says "matrices in bfloat16 and mxfp4 56.3 GiB, embedding 1.1 GiB, scales 3.3 GiB"
      And the planner says "16 tokens x 18 layers; groups of layers: 1 of full attention and 1 of 128 tokens"
      When I plan "model=gpt_oss_20b hardware=h100_sxm executor.dtype=bfloat16"
      Then the planner says "148,361 blocks, 2,373,776 token slots of 12 layers; contiguous: 9 slots, 1,179,648 token slots of 24 layers"

    @R2.1
    Scenario: Devices are given in short
      Then the planner finds the same for "tensor_parallel=4" as for "executor.tensor_parallel=4" on hardware

    @R29.1
    Scenario Outline: vLLM <version> reported <blocks> blocks at its start
      When I plan "<settings> framework.version=<version> scheduler.max_batched_tokens=2048"
      Then within 2 % of <blocks> blocks of 16 tokens fit
      And the planner says "<counted>"

      # Published by LLMServingSim's authors with all settings (experiments/planner_vs_vllm); nothing is fitted to them.
      Examples:
        | settings                                                                                                   | version | blocks | counted                                       |
        | model=llama3_1_8b hardware=rtx_4090 model.max_seq_len=32768 scheduler.max_batch_size=256                    | 0.19.0  | 2588   | while kernels are compiled and timed          |
        | model=qwen3_32b hardware=rtx_pro_6000_server tensor_parallel=2 executor.memory_utilization=0.92 scheduler.max_batch_size=128 | 0.28.0  | 28884  | while kernels are compiled and timed |

    @R29.1
    Scenario Outline: A fleet of <model> reported <blocks> blocks of a vLLM whose Docker image has FlashInfer
      When I plan "model=<model> hardware=h100_sxm tensor_parallel=<devices> framework=vllm_synchronous framework.version=0.10.0"
      Then the planner says "x 38 bytes (14 where FlashInfer is installed, as in vLLM's Docker images: framework.flashinfer_sampler=true)"
      When I run "model=<model> executor.dtype=bfloat16 executor.timing=roofline hardware=h100_sxm executor.tensor_parallel=<devices> framework=vllm_synchronous framework.version=0.10.0 workload.num_requests=1 figures=false" on a tiny model
      Then the message says "vLLM counts 38 bytes for each logit at its start (14 where FlashInfer is installed, as in vLLM's Docker images: framework.flashinfer_sampler=true)"
      When I plan "model=<model> hardware=h100_sxm tensor_parallel=<devices> framework=vllm_synchronous framework.version=0.10.0 framework.flashinfer_sampler=true"
      Then within 2 % of <blocks> blocks of 16 tokens fit

      # Reported by llm-d (experiments/fleet_vs_llm_d); nothing is fitted to them.
      Examples:
        | model         | devices | blocks |
        | qwen3_32b     | 2       | 19208  |
        | llama3_1_70b  | 4       | 28836  |

    @R29.25
    Scenario Outline: With <settings> a server takes <share> of the memory
      When I plan "model=qwen3_8b hardware=h100_sxm <settings>"
      Then the planner has <share> of 81079 MiB
      And the message says "on h100_sxm: executor.memory_utilization=<share> of 79.2 GiB <whose>"

      # 81,559 MiB, of which the driver keeps 480. vLLM's share grew with the CUDA graphs that it counts since.
      Examples:
        | settings                                                  | share | whose                    |
        | framework=vllm                                            | 0.92  | (vLLM 0.33's default)    |
        | framework.cuda_graphs=false                               | 0.92  | (vLLM 0.33's default) ... published starts of vllm had pools within 3 %; none is known to have been without CUDA graphs |
        | framework.version=0.21.0                                  | 0.92  | (vLLM 0.21.0's default)  |
        | framework.version=0.19.0                                  | 0.9   | (vLLM 0.19.0's default)  |
        | framework=vllm_synchronous                                | 0.9   | (vLLM 0.12's default)    |
        | framework.version=0.19.0 executor.memory_utilization=0.92 | 0.92  | weights                  |

    @R29.25
    Scenario Outline: SGLang <version> takes <share> of what is free on <hardware>, and leaves steps the rest
      When I plan "model=<model> hardware=<hardware> framework=sglang <settings>"
      Then the message says "executor.memory_utilization=<share> of <free> GiB free before the weights (SGLang <version>'s default)"
      And the message says "in what is left free"
      And within 1 % of <blocks> blocks of <size> tokens fit

      # Published starts had as many tokens (experiments/planner_vs_sglang); nothing is fitted to them.
      Examples:
        | model       | hardware | settings                 | version | share | free  | blocks | size |
        | llama3_1_8b | h100_sxm | framework.version=0.4.1  | 0.4.1   | 0.88  | 78.5  | 27781  | 16   |
        | qwen3_8b    | gb300    | framework.version=0.5.12 | 0.5.12  | 0.906 | 275.7 | 26686  | 64   |

    @R29.25
    Scenario: With a share of its own a simulated SGLang has the words of no default
      When I plan "model=qwen3_8b hardware=h100_sxm framework=sglang executor.memory_utilization=0.7"
      Then the message says "executor.memory_utilization=0.7 of 78.5 GiB free before the weights"
      And nothing is said of "default)"

    @R2.5
    Scenario Outline: A memory holds <contiguous> slots of 4096 tokens, or <paged> sequences of <length>
      When I plan "model=qwen3_0_6b kv.memory=4GiB model.max_seq_len=4096 lengths=<length>"
      Then <contiguous> contiguous and <paged> paged sequences of <length> tokens fit

      # 4 GiB at 112 KiB a token are 37,449 tokens: 9 slots, or 2,340 blocks of 16.
      Examples:
        | length | contiguous | paged |
        | 256    | 9          | 146   |
        | 257    | 9          | 137   |
        | 1024   | 9          | 36    |
        | 4096   | 9          | 9     |

  Rule: As many sequences as planned run at once, and no more

    @R10.3
    Scenario Outline: Sequences of <length> tokens enter pools of 1 MiB until one finds no room
      When I plan "model=qwen3_tiny kv.memory=1MiB model.max_seq_len=512 lengths=<length> executor=cpu"
      Then exactly as many sequences of <length> tokens as planned enter the server with kv=paged
      And exactly as many sequences of <length> tokens as planned enter the server with kv=contiguous

      Examples:
        | length |
        | 1      |
        | 16     |
        | 17     |
        | 100    |
        | 512    |

    @R10.3
    Scenario Outline: A run with kv=<kv> has what was planned beside what it measured
      When I run "kv=<kv> kv.num_blocks=20 workload.num_requests=12 workload.prompt_len={min:17,max:17} workload.output_len={min:15,max:15} scheduler.admission_reserve=0" on a tiny model
      Then the command succeeds
      And <planned> sequences were planned to run at once, and as many did

      # Sequences of 32 tokens: 2 blocks each, or a slot of 64 tokens.
      Examples:
        | kv         | planned |
        | paged      | 10      |
        | contiguous | 5       |

  Rule: What cannot be planned is refused in a sentence

    @R13.1
    Scenario: A model is a name, a directory or its config.json
      Given a directory with the config.json of "qwen3_tiny"
      Then the planner finds the same for "model=qwen3_tiny", the directory and the file

    @R2.6
    Scenario Outline: The planner refuses <arguments>
      When I plan "<arguments>"
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | arguments                        | message                                                                     |
        | model=qwen3_4b memory=6GiB       | memory=6.0 GiB: ... 7.5 GiB ... more ... executor.weights=int8 ... would fit |
        | model=qwen3_4b memory=100MiB     | memory=100.0 MiB: ... memory=8421MiB would do; or take a smaller model      |
        | model=qwen9 memory=16GiB         | model=qwen9: unknown; known: ... llama3_2_1b, ... qwen3_4b, ... config.json |
        | model=qwen3_4b executor=simulated memory=16GiB | hardware=null: executor=simulated needs a device, as hardware=h100_sxm |
        | memory=abc                       | memory=abc: is not a size; write for example 512MiB                         |
        | memory=16GiB lengths=0           | lengths=0: mean lengths are whole numbers ... such as 256,512               |
        | memory=16GiB lengths=5000        | lengths=5000: a mean length is from 1 to model.max_seq_len=1024             |
        | memory=16GiB kv.blok_size=8      | kv.blok_size=8: unknown; did you mean kv.block_size?                        |
        | memry=16GiB                      | memry=16GiB: unknown; did you mean memory?                                  |
        | memory=16GiB kv.block_size=8,16  | kv.block_size=8,16: the planner does not sweep: give one value              |
        | model=qwen3_8b executor=cuda memory=80GiB tensor_parallel=4 | executor.tensor_parallel=4: needs the kind of the devices, as hardware=h100_sxm     |
        | model=gemma3_1b tensor_parallel=2 | executor.tensor_parallel=2: gemma3_text has 1 KV heads, which cannot be divided so; 1 would do |
        | model=qwen3_8b executor.weights=fp8 executor=cpu | executor.weights=fp8: is stored by simulated devices alone |
        | model=qwen3_8b executor.weights=nvfp4 executor=cpu | executor.weights=nvfp4: is stored by simulated devices alone (executor=simulated hardware=b200_sxm); here use int8 or auto |
        | memory=16GiB kv=segmented        | kv=segmented: unknown; known: contiguous, paged                             |

    @R2.6
    Scenario Outline: A config.json without <key>
      Given a directory with the config.json of "qwen3_tiny"
      And the config.json lacks "<key>"
      When I plan for that directory in 16 GiB
      Then the command fails without a traceback
      And the message says "config.json ... <key>"

      Examples:
        | key                 |
        | num_key_value_heads |
        | head_dim            |
        | num_hidden_layers   |
        | model_type          |

    @R2.6
    Scenario: A model of a family that is not known
      Given a directory with the config.json of "qwen3_tiny"
      And the config.json has "gpt9" as "model_type"
      When I plan for that directory in 16 GiB
      Then the command fails without a traceback
      And the message says "gpt9 ... unknown ... llama ... qwen3"
