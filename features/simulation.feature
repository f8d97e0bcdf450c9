Feature: Simulation
  A run on a simulated device: the engine decides, the device's time is computed.

  Rule: A device is a choice like any other, and nothing hides that it is simulated

    @R14.1 @tracked
    Scenario: A run on one H100
      When I run "executor=simulated hardware=h100_sxm kv.memory=1MiB" on a tiny model
      Then the command succeeds
      And the message says "4 requests on simulated h100_sxm, timing roofline"
      And all 4 requests were completed
      And the summary says "simulated h100_sxm, timing roofline" for its machine
      And the tracked run has the tags "resolved.device=h100_sxm" and "resolved.timing=roofline"

    @R14.1 @R10.3
    Scenario: The first comparison that a user runs, simulated in as many bytes, has as many sequences at once
      Given a laboratory with a store of its own
      When I sweep in the laboratory "experiment=contiguous_vs_paged_h100 executor.timing=roofline kv.memory=4MiB model.max_seq_len=4096 scheduler.max_batch_size=64 workload.num_requests=24 workload.output_len.min=16 workload.output_len.max=20 figures=false"
      Then it ends with status 0
      And in the same bytes its points had
        | kv             | sequences at once | prompt tokens from the cache |
        | contiguous     | 2                 | 0                            |
        | paged_unshared | 19                | 0                            |
        | paged          | 24                | 8832                         |
      And it says "Nothing was computed: simulated h100_sxm, timing roofline."

    @R14.1
    Scenario: A model too large for here, on two devices of four kinds
      When I run "executor=simulated executor.timing=roofline executor.dtype=bfloat16 model=qwen3_8b executor.tensor_parallel=2 hardware=<device>" for each of these devices
        | device    |
        | l40s      |
        | a100_sxm  |
        | h200_sxm  |
        | b200_sxm  |
      Then each has a larger cache than the one before, and takes less time

    @R14.2
    Scenario: The same settings give the same records
      When I run "executor=simulated hardware=l4 kv.memory=1MiB scheduler.max_batch_size=2 workload.arrival=poisson workload.rate=5" on a tiny model twice
      Then both runs have the same requests.parquet and steps.parquet, byte for byte

    @R30.12
    Scenario Outline: <watts> W for each of <devices> devices bound the energy of a token
      When I run "executor=simulated hardware=l4 hardware.power_watts=<watts> executor.timing=roofline <fleet>" on a tiny model
      Then <all> W bound the energy of its output tokens
      And the message says "<message>"

      Examples:
        | watts | devices | fleet                                       | all | message                                  |
        | 72    | 1       | seed=0                                      | 72  | energy of an output token, at most ... J |
        | 72    | 2       | executor.tensor_parallel=2                  | 144 | energy of an output token, at most ... J |
        | 72    | 4       | executor.tensor_parallel=2 fleet.replicas=2 | 288 | energy of an output token, at most ... J |
        | 0     | 1       | seed=0                                      | 0   | output tokens                            |

  Rule: Steps take as long as their operations were measured to take, where the tables are installed

    @R14.1
    Scenario: A run with measured operations
      Given the tables of measured operations
      When I run "executor=simulated executor.timing=silicon executor.dtype=bfloat16 model=qwen3_8b hardware=h100_sxm" on a tiny model
      Then the message says "4 requests on simulated h100_sxm, timing silicon (vllm 0.24.0 on h100_sxm)"
      And all 4 requests were completed

    @R14.3
    Scenario Outline: The tables do not have <override>
      Given the tables of measured operations
      When I run "executor=simulated executor.timing=silicon executor.dtype=bfloat16 model=qwen3_8b hardware=h100_sxm <override>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | override              | message                                                                                |
        | hardware=l4           | hardware=l4: timing=silicon has vllm on a100_sxm ... or take executor.timing=roofline  |
        | model=qwen3_tiny      | model=qwen3_tiny: vllm 0.24.0 on h100_sxm was measured with ... or take executor.timing=roofline |

    @R29.3
    Scenario Outline: A device of the tables is a choice
      Given the tables of measured operations
      When I run "executor=simulated executor.dtype=bfloat16 model=qwen3_8b hardware=<device>" on a tiny model
      Then the message says "timing silicon (vllm 0.24.0 on <device>)"

      Examples:
        | device              |
        | gb300               |
        | rtx_pro_6000_server |

    @R29.2
    Scenario: Of another version than was measured, the nearest is taken, and said
      Given the tables of measured operations
      When I run "executor=simulated executor.dtype=bfloat16 model=qwen3_8b hardware=h100_sxm framework.version=0.19.0" on a tiny model
      Then the message says "timing silicon (vllm 0.24.0 on h100_sxm, the nearest to 0.19.0)"

    @R29.26
    Scenario Outline: On <devices> B300 <kind> steps take what they were recorded to take
      Given the tables of measured operations
      Then half of the recorded <kind> steps on <devices> devices are simulated within <percent> %

      # experiments/simulated_steps: nothing is fitted to them.
      Examples:
        | kind    | devices | percent |
        | prefill | 1       | 7       |
        | prefill | 8       | 7       |
        | mixed   | 1       | 4       |
        | mixed   | 2       | 4       |
        | mixed   | 4       | 4       |
        | mixed   | 8       | 4       |
        | decode  | 1       | 12      |
        | decode  | 2       | 8       |
        | decode  | 4       | 5       |
        | decode  | 8       | 5       |

    @R29.5
    Scenario: A prediction says how sure it is
      Given the tables of measured operations
      When I run "executor=simulated executor.dtype=bfloat16 model=qwen3_8b hardware=l40s" on a tiny model
      Then the message says "nine of ten of ... measured vllm deployments of dense models had tpot within ... and ttft within ...; none is on l40s"
      And the message says "tokens each; executor.memory_utilization=0.92 of 44.5 GiB (vLLM 0.33's default); timing silicon"

    @R29.25
    Scenario: A simulated SGLang runs with the share of memory that SGLang takes, which leaves steps theirs
      When I run "executor=simulated executor.dtype=bfloat16 executor.timing=roofline hardware=h100_sxm model=qwen3_8b framework=sglang workload.num_requests=2 figures=false" on a tiny model
      Then the message says "executor.memory_utilization=0.83 of 78.5 GiB free before the weights (SGLang 0.5.23's default)"
      And all 2 requests were completed

    @R29.14
    Scenario: A server without CUDA graphs keeps no memory for them, and its steps wait for the host
      Given the tables of measured operations
      When I run "executor=simulated executor.dtype=bfloat16 hardware=h100_sxm model=qwen3_8b workload.num_requests=2 figures=false framework.cuda_graphs=false" on a tiny model
      Then the message says "KV cache: 24895 blocks"
      And the message says "warning: framework.cuda_graphs=false: steps are timed as with CUDA graphs, and are too short where the host takes longer to launch them: for 36 layers 7.1 to 80 ms on the hosts of 19 published cases"
      And nothing is said of "predicted: mean"
      When I run "executor=simulated executor.dtype=bfloat16 executor.timing=roofline hardware=h100_sxm model=qwen3_8b workload.num_requests=2 figures=false framework.cuda_graphs=false framework.eager_layer_us=500" on a tiny model
      Then the message says "without CUDA graphs a step takes 18 ms or more: 36 layers x framework.eager_layer_us=500. Predicted so from one case of its host, 19 published cases came out 32 % too short to 13 % too long"
      And the message says "per output token, p50 ... 18.0 ms"
      When I run "executor=simulated executor.dtype=bfloat16 executor.timing=roofline hardware=h100_sxm model=qwen3_8b workload.num_requests=2 figures=false" on a tiny model
      Then the message says "KV cache: 23988 blocks"
      And nothing is said of "CUDA graphs"

    @R29.21
    Scenario: Each predicted latency says how near it is likely to be
      Given the tables of measured operations
      When I run "executor=simulated executor.dtype=bfloat16 model=qwen3_8b hardware=h100_sxm" on a tiny model
      Then the message says "predicted: mean ttft ... (measured deployments like this: within ... %, 90 % of them); mean tpot ... (measured deployments like this"

    @R29.21
    Scenario: What is not in measured operations, and what a mixture's weights are stored in
      Given the tables of measured operations
      When I run "executor=simulated executor.dtype=bfloat16 model=gpt_oss_20b hardware=h100_sxm hardware.bandwidth_gb_s=64 hardware.link_efficiency=0.5 workload.num_requests=2 figures=false" on a tiny model
      Then the message says "20,915 M parameters, 12.8 GiB in bfloat16 and mxfp4"
      And the message says "warning: hardware.bandwidth_gb_s=64 has no effect here: steps take what was measured, timing silicon (vllm ... on h100_sxm); executor.timing=roofline reads it ... hardware.link_efficiency=0.5 has no effect"

    @R29.21
    Scenario: What is read of experts and of fp8 alone is named where a model has neither
      Given the tables of measured operations
      When I run "executor=simulated executor.dtype=bfloat16 model=qwen3_8b hardware=h100_sxm framework.fp8_scales=static framework.expert_kernels=triton" on a tiny model
      Then the message says "warning: framework.fp8_scales=static has no effect here: the model has no weights in fp8 ... framework.expert_kernels=triton has no effect here: the model has no experts"
      When I run "executor=simulated executor.dtype=bfloat16 model=qwen3_8b hardware=h100_sxm executor.weights=fp8 framework.fp8_scales=static framework=sglang" on a tiny model
      Then nothing is said of "framework."
      When I run "executor=simulated executor.dtype=bfloat16 model=qwen3_30b_a3b hardware=h200_sxm framework.expert_kernels=triton" on a tiny model
      Then nothing is said of "framework.expert_kernels"

    @R29.21
    Scenario Outline: Kernels that were not measured, and all-reduces that there are none of
      Given the tables of measured operations
      When I run "executor=simulated executor.dtype=bfloat16 <deployment> <setting> workload.num_requests=2 figures=false" on a tiny model
      Then the message says "warning: <setting> has no effect here: <why>"

      Examples:
        | deployment                                             | setting                             | why                                                                    |
        | model=qwen3_30b_a3b hardware=h100_sxm framework=sglang | framework.expert_kernels=triton     | sglang ... on h100_sxm lacks such kernels for the model's experts      |
        | model=gpt_oss_20b hardware=h100_sxm                    | framework.expert_kernels=trtllm_gen | vllm ... on h100_sxm lacks such kernels for the model's experts        |
        | model=qwen3_8b hardware=h100_sxm                       | framework.fused_allreduce_mib=4.0   | no all-reduce ends in the norm behind it                               |

    @R23.3
    Scenario: What measured operations alone read is named where the roofline times steps
      When I run "executor=simulated executor.timing=roofline hardware=l4 framework=trtllm framework.fp8_scales=static framework.expert_kernels=tables" on a tiny model
      Then the message says "warning: framework.fp8_scales=static has no effect here: steps take what bandwidth and arithmetic give, timing roofline; executor.timing=silicon reads it ... framework.expert_kernels=tables has no effect"
      When I run "executor=simulated executor.timing=roofline hardware=l4 framework=trtllm" on a tiny model
      Then nothing is said of "framework.expert_kernels"

    @R29.4
    Scenario: Two devices over PCIe exchange as the version did that is asked for
      Given the tables of measured operations
      When I run "executor=simulated executor.dtype=bfloat16 model=qwen3_8b hardware=rtx_pro_6000_server executor.tensor_parallel=2 framework.version=0.19.0" on a tiny model
      Then the message says "timing silicon (vllm 0.24.0 on rtx_pro_6000_server, the nearest to 0.19.0, links of 0.19.0)"

    @R29.29
    Scenario Outline: <model> with weights in <weights> on <devices>
      Given the tables of measured operations
      When I run "executor=simulated executor.dtype=bfloat16 model=<model> executor.weights=<weights> hardware=<devices>" on a tiny model
      Then the message says "timing <timing>"
      And all 4 requests were completed

      Examples:
        | model        | weights | devices                                         | timing |
        | qwen3_8b     | nvfp4   | b200_sxm                                        | silicon (vllm 0.24.0 on b200_sxm) |
        | qwen3_8b     | nvfp4   | b200_sxm framework=trtllm                       | silicon (trtllm 1.3.0rc20 on b200_sxm, nvfp4 of sglang 0.5.14) |
        | minimax_m2   | nvfp4   | b300_sxm executor.tensor_parallel=2             | silicon (vllm 0.24.0 on b300_sxm) |
        | kimi_k2_5    | auto    | h200_sxm executor.tensor_parallel=8             | silicon (vllm 0.24.0 on h200_sxm, latent attention of trtllm 1.3.0rc20) |
        | qwen3_8b     | nvfp4   | h100_sxm                                        | roofline: no operations were measured: executor.weights=nvfp4: vllm 0.24.0 on h100_sxm was measured with bfloat16, float16, fp8; ... h100_sxm has no arithmetic in fp4: nvfp4 is multiplied in bfloat16 |
        | qwen3_8b     | int4_wo | h100_sxm                                        | roofline: no operations were measured: executor.weights=int4_wo |

    @R29.28
    Scenario: What is computed here refuses weights in 4 bits
      When I run "executor.weights=int4_wo" on a tiny model
      Then the command fails without a traceback
      And the message says "executor.weights=int4_wo: is stored by simulated devices alone (executor=simulated hardware=h100_sxm); here use int8 or auto"

    @R29.11
    Scenario Outline: <model> on <devices>
      Given the tables of measured operations
      When I run "executor=simulated executor.dtype=bfloat16 model=<model> <devices>" on a tiny model
      Then the message says "timing silicon (<tables>)"
      And the message says "experts are loaded by the power law of their measurements"
      And all 4 requests were completed

      Examples:
        | model           | devices                                                                          | tables                         |
        | gpt_oss_20b     | hardware=h100_sxm kv.offload=1GiB                                                | vllm 0.24.0 on h100_sxm        |
        | qwen3_235b_a22b | hardware=h200_sxm executor.tensor_parallel=8                                     | vllm 0.24.0 on h200_sxm        |
        | deepseek_v3     | hardware=h200_sxm executor.attention_data_parallel=8 executor.expert_parallel=8  | vllm 0.24.0 on h200_sxm, fp8_block of sglang 0.5.14, latent attention of trtllm 1.3.0rc20 |
        | kimi_k2         | hardware=b200_sxm executor.tensor_parallel=8 framework=sglang                    | sglang 0.5.14 on b200_sxm      |

    @R29.30
    Scenario Outline: Experts of <model> on <devices> with <kernels>
      Given the tables of measured operations
      When I run "executor=simulated executor.dtype=bfloat16 model=<model> hardware=<devices> framework.expert_kernels=<kernels>" on a tiny model
      Then the message says "timing silicon (<tables>)"
      And all 4 requests were completed

      Examples:
        | model        | devices                                              | kernels    | tables                                                     |
        | gpt_oss_120b | b200_sxm                                             | trtllm_gen | vllm 0.24.0 on b200_sxm, w4a8_mxfp4_mxfp8 of sglang 0.5.14 |
        | deepseek_v3  | b200_sxm executor.tensor_parallel=8 framework=trtllm | trtllm_gen | trtllm 1.3.0rc20 on b200_sxm, fp8_block of sglang 0.5.14   |
        | minimax_m2   | b200_sxm executor.tensor_parallel=4                  | triton     | vllm 0.24.0 on b200_sxm, experts of vllm 0.19.0, fp8_block of sglang 0.5.14 |
        | minimax_m2   | h200_sxm executor.tensor_parallel=4                  | cutlass    | vllm 0.24.0 on h200_sxm, experts of trtllm 1.3.0rc20, fp8_block of sglang 0.5.14 |
        | minimax_m2   | b300_sxm executor.tensor_parallel=4                  | triton     | vllm 0.24.0 on b300_sxm, fp8_block of sglang 0.5.14        |

    @R29.12
    Scenario: Where experts were not measured as they are divided, the roofline is taken, and says why
      Given the tables of measured operations
      When I run "executor=simulated executor.dtype=bfloat16 model=deepseek_v3 hardware=h200_sxm executor.tensor_parallel=8 executor.expert_parallel=4" on a tiny model
      Then the message says "timing roofline"
      And the message says "executor.expert_parallel=4: vllm 0.24.0 on h200_sxm was not measured with experts of deepseek_v3 in fp8_block that are divided so; ... it was with 1 or 8"
      And all 4 requests were completed

    @R14.1
    Scenario: The roofline says that it links the devices of several servers as those of one
      When I run "executor=simulated executor.dtype=bfloat16 model=qwen3_8b executor.timing=roofline hardware=h100_sxm executor.tensor_parallel=16" on a tiny model
      Then the message says "warning: timing roofline links all 16 devices with hardware.link_gb_s=450, as the 8 of one server"

    @R14.1
    Scenario: Half the bytes in fp8: more room, and less time
      When I run "executor=simulated hardware=l4 executor.dtype=bfloat16 model=qwen3_8b <setting>" for each of these settings
        | setting                                      |
        | kv.dtype=auto                                |
        | executor.weights=fp8                         |
        | executor.weights=fp8 kv.dtype=fp8_e5m2       |
      Then each has a larger cache than the one before, and takes less time

  Rule: The time of a step can be fitted to runs that were computed

    @R14.4
    Scenario: A real run, calibrated on, then simulated
      Given a recorded run of a tiny model that has enough steps
      When I calibrate on it
      Then the command succeeds
      And the message says "steps ... 95 % interval ... held out, each of 5 parts of the run: a step is off by"
      When I simulate it with that calibration
      Then the command succeeds
      And the message says "simulated here, timing fitted on ..., 1 thread"
      And the message says "timing fitted on ...: steps held out of the fit were off by ... % in the median, ... all together by"
      And the message says "warning: hardware.launch_us=3 has no effect here: steps take what was measured, timing fitted on ...; executor.timing=roofline reads it"
      And nothing is said of "hardware.bandwidth_gb_s"
      And all 4 requests were completed

    @R14.4
    Scenario Outline: A calibration on <what> is refused
      Given a recorded run of a tiny model that has <what>
      When I calibrate on it
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | what                  | message                                                                                |
        | too few steps         | 16 steps with tokens in 1 run; a calibration needs 50 or more: name longer runs        |
        | no steps.parquet      | has no steps.parquet; name a run that was recorded to its end                          |
        | a cut steps.parquet   | steps.parquet: cannot be read                                                          |
        | simulated its steps   | was simulated; calibrate on runs that computed their steps                             |
        | another model beside  | another model than ... qwen3_tiny ...; calibrate on runs of one model at a time        |
        | another machine beside | another machine than ... a faraway machine ...; calibrate on runs of one machine at a time |

    @R14.4
    Scenario Outline: A simulation with <what> is refused
      When I run "executor=simulated hardware=l4 executor.timing=fitted <settings>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | what                   | settings                           | message                                                                       |
        | no calibration         | seed=1                             | executor.timing_path=null: timing=fitted reads a file that kvlab calibrate    |
        | a calibration not there | executor.timing_path=no/such.yaml | executor.timing_path=no/such.yaml: cannot be read: No such file or directory  |

  Rule: A recorded run can be played back, and decides the same

    @R14.5
    Scenario: A real run with preemptions, played back
      Given a recorded run of a tiny model that has too little memory
      When I play it back with ""
      Then the command succeeds
      And the message says "4 requests on playback of"
      And the message says "note: played back ... steps, 4 requests, ... block events: every decision is that of the recording"
      And both runs have the same requests.parquet and blocks.parquet, byte for byte

    @R14.5
    Scenario Outline: A playback with <settings> says where it parts from the recording
      Given a recorded run of a tiny model that has too little memory
      When I play it back with "<settings>"
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | settings                   | message                                                                              |
        | scheduler.max_batch_size=2 | step 0: ... instead of ...; settings differ: scheduler.max_batch_size=2 instead of 3 |
        | kv.num_blocks=9            | step 0: blocks_total 9 instead of 7; settings differ: kv.num_blocks=9 instead of 7   |
        | seed=7                     | instead of ...; settings differ: seed=7 instead of 0                                 |

    @R14.5
    Scenario Outline: A playback of a run with <what> is refused
      Given a recorded run of a tiny model that has <what>
      When I play it back with ""
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | what                  | message                                                                 |
        | no summary.json       | is no directory of a recorded run, it has no summary.json               |
        | a cut summary.json    | summary.json: cannot be read as a run's summary                         |
        | not finished          | its status is interrupted; only a run that finished can be played back |
        | no steps.parquet      | has no steps.parquet; name a run that was recorded to its end           |
        | a cut steps.parquet   | steps.parquet: cannot be read                                           |

  Rule: What cannot be simulated is named

    @R14.3
    Scenario Outline: <override>
      When I run "<override>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | override                                                  | message                                                                          |
        | executor=simulated                                        | hardware=null: executor=simulated needs a device, as hardware=h100_sxm           |
        | executor=cpu hardware=h100_sxm                            | hardware=h100_sxm: can only be simulated; use executor=simulated                 |
        | executor=simulated hardware=h100                          | hardware=h100: unknown; known: a100_pcie, a100_sxm, ... did you mean h100_sxm?              |
        | executor=simulated hardware=l4 hardware.memory=600MiB     | for weights, steps and one block ... is less; take a smaller model               |
        | executor=simulated hardware=l4 executor.tensor_parallel=3 | executor.tensor_parallel=3: qwen3_tiny has ... 2 KV heads, which it has to divide |
        | executor=simulated hardware=l4 executor.expert_parallel=2 | executor.expert_parallel=2: is for mixtures of experts, and qwen3_tiny has no experts; leave it at 1 |
        | executor.attention_data_parallel=2                        | executor.attention_data_parallel=2: devices can only be simulated; use executor=simulated |
        | executor.weights=fp8                                      | executor.weights=fp8: is stored by simulated devices alone ... use int8 or auto  |
        | executor=simulated hardware=l4 debug.profile=true         | debug.profile=True: executor.kind=simulated has no parts to be timed            |
        | executor=simulated hardware=h200_sxm model=minimax_m2 executor.tensor_parallel=8 | 8 devices cannot divide into parts of 128 ... executor.expert_parallel=8 divides the experts by number |
        | executor=simulated hardware=l4 model=llama3_1_70b executor.dtype=bfloat16 | llama3_1_70b needs ... executor.tensor_parallel=8 would do |
