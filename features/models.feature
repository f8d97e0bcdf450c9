Feature: The model computes what transformers computes
  Each model is small, its weights are random, and transformers wrote its files. Logits are compared in float32
  for every token, to 0.00005.

  Rule: Logits are equal for prefill, for chunks, and for decode at mixed positions

    @R11.1
    Scenario Outline: <model> prefills prompts of 1 to 90 tokens in one batch, in <memory>
      Given the model "<model>"
      And its K and V in <memory>
      And texts of 1, 16, 17, 50, 90 tokens
      When all tokens of each run in one step
      Then the logits of every token are those of transformers
      And K and V of every token are those of transformers

      Examples:
        | model       | memory                           |
        | qwen3       | 30 blocks of 16 tokens           |
        | qwen3       | 200 blocks of 1 token            |
        | qwen3       | 5 contiguous slots of 128 tokens |
        | llama       | 30 blocks of 16 tokens           |
        | llama       | 5 contiguous slots of 128 tokens |
        | llama3 rope | 30 blocks of 16 tokens           |
        | qwen2       | 30 blocks of 16 tokens           |
        | qwen2       | 5 contiguous slots of 128 tokens |
        | gemma3      | 30 blocks of 16 tokens           |
        | gemma3      | 200 blocks of 1 token            |
        | gemma3      | 5 contiguous slots of 128 tokens |

    @R11.1
    Scenario Outline: <model> prefills in chunks of <chunk> tokens
      Given the model "<model>"
      And its K and V in 30 blocks of 16 tokens
      And texts of 50, 90, 33 tokens
      When <chunk> tokens of each run in each step, until the end
      Then the logits of every token are those of transformers
      And K and V of every token are those of transformers

      Examples:
        | model       | chunk |
        | qwen3       | 7     |
        | qwen3       | 16    |
        | llama       | 7     |
        | llama       | 17    |
        | llama3 rope | 7     |
        | qwen2       | 7     |
        | qwen2       | 17    |
        | gemma3      | 7     |
        | gemma3      | 16    |
        | gemma3      | 40    |

    @R11.1
    Scenario Outline: <model> decodes five texts at positions 3 to 100 in one batch, in <memory>
      Given the model "<model>"
      And its K and V in <memory>
      And texts of 23, 36, 53, 120, 52 tokens
      When their first 3, 16, 33, 100, 32 tokens run in one step
      And 1 token of each runs in each step, until the end
      Then the logits of every token are those of transformers
      And K and V of every token are those of transformers

      Examples:
        | model       | memory                           |
        | qwen3       | 30 blocks of 16 tokens           |
        | qwen3       | 5 contiguous slots of 128 tokens |
        | llama       | 30 blocks of 16 tokens           |
        | llama       | 5 contiguous slots of 128 tokens |
        | llama3 rope | 30 blocks of 16 tokens           |
        | qwen2       | 30 blocks of 16 tokens           |
        | qwen2       | 5 contiguous slots of 128 tokens |
        | gemma3      | 30 blocks of 16 tokens           |
        | gemma3      | 5 contiguous slots of 128 tokens |

    @R11.1
    Scenario Outline: <model> runs a prompt, a chunk and a decode in the same step
      Given the model "<model>"
      And its K and V in 30 blocks of 16 tokens
      And texts of 41, 60, 20 tokens
      When their first 40, 17, 0 tokens run in one step
      And their next 1, 30, 20 tokens run in one step
      And their next 0, 13, 0 tokens run in one step
      Then the logits of every token are those of transformers

      Examples:
        | model             |
        | qwen3             |
        | llama             |
        | llama3 rope       |
        | llama with biases |
        | qwen2             |
        | gemma3            |

    @R11.1
    Scenario Outline: Positions past the original context, which RoPE scaling reaches: <model>, <way>
      Given the model "<model>"
      And its K and V in 60 blocks of 16 tokens
      And texts of 300, 65, 512 tokens
      When <way>
      Then the logits of every token are those of transformers
      And K and V of every token are those of transformers
      And without its RoPE scaling the model would say something else

      Examples:
        | model              | way                                               |
        | llama3 rope        | all tokens of each run in one step                |
        | llama3 rope        | 50 tokens of each run in each step, until the end |
        | gemma3 linear rope | all tokens of each run in one step                |
        | gemma3 linear rope | 50 tokens of each run in each step, until the end |

    @R11.1
    Scenario Outline: Only the tokens that are sampled get logits: <model>
      Given the model "<model>"
      And its K and V in 30 blocks of 16 tokens
      And texts of 5, 40, 17 tokens
      When all tokens of each run in one step, asking for the logits of their last tokens
      Then there are 3 rows of logits
      And the logits of every token asked for are those of transformers

      Examples:
        | model  |
        | qwen3  |
        | llama  |
        | qwen2  |
        | gemma3 |

  Rule: Each sequence of a batch gets the rotary angles of its own positions

    @R11.2
    Scenario Outline: The same token at positions 0, 5, 37 and 120 of four texts: <model>
      Given the model "<model>"
      And its K and V in 40 blocks of 16 tokens
      And texts of 1, 6, 38, 121 tokens that end in the same token
      When their first 0, 5, 37, 120 tokens run in one step
      And 1 token of each runs in each step, until the end
      Then K of that token in the first layer is what transformers stores at positions 0, 5, 37, 120
      And no two of them are equal

      Examples:
        | model       |
        | qwen3       |
        | llama       |
        | llama3 rope |
        | qwen2       |
        | gemma3      |

    @R11.2
    Scenario Outline: The order of a batch does not matter: <model>
      Given the model "<model>"
      And its K and V in 40 blocks of 16 tokens
      And texts of 121, 2, 38 tokens
      When their first 120, 1, 37 tokens run in one step
      And 1 token of each runs in each step, until the end
      Then K and V of every token are those of transformers

      Examples:
        | model  |
        | qwen3  |
        | llama  |
        | qwen2  |
        | gemma3 |

  Rule: A sliding-window layer sees the window of each sequence and nothing before, whatever its neighbours' lengths

    @R11.3
    Scenario Outline: <model>, texts shorter and longer than its window side by side: <way>
      Given the model "<model>"
      And its K and V in <memory>
      And texts of 100, 5, 32, 65, 24, 25, 33 tokens
      When <way>
      Then the logits of every token are those of transformers
      And K and V of every token are those of transformers
      And without its sliding windows the model would say something else

      Examples:
        | model         | memory                           | way                                               |
        | gemma3        | 30 blocks of 16 tokens           | all tokens of each run in one step                |
        | gemma3        | 30 blocks of 16 tokens           | 30 tokens of each run in each step, until the end |
        | gemma3        | 7 contiguous slots of 112 tokens | 1 token of each runs in each step, until the end  |
        | qwen2 sliding | 30 blocks of 16 tokens           | all tokens of each run in one step                |
        | qwen2 sliding | 7 contiguous slots of 112 tokens | 30 tokens of each run in each step, until the end |
        | qwen2 sliding | 30 blocks of 16 tokens           | 1 token of each runs in each step, until the end  |
        | qwen3 sliding | 30 blocks of 16 tokens           | 30 tokens of each run in each step, until the end |

    @R11.3 @every_backend
    Scenario Outline: A window of 32 tokens, and another token <distance> before the last: <result>
      Given the model "<model> of one sliding layer"
      And its K and V in 40 blocks of 16 tokens
      And attention computed by the backend
      And texts of 90, 60, 33 tokens
      And the same texts with another token <distance> places before the last
      When their first 70, 59, 12, 89, 28, 32 tokens run in one step
      And 7 tokens of each run in each step, until the end
      Then the logits of every token are those of transformers
      And the last tokens of the changed texts get <result> logits

      Examples:
        | model  | distance | result    |
        | qwen2  | 1        | other     |
        | qwen2  | 31       | other     |
        | qwen2  | 32       | the same  |
        | qwen3  | 31       | other     |
        | qwen3  | 32       | the same  |
        | gemma3 | 31       | other     |
        | gemma3 | 32       | the same  |

  Rule: Weights are read from one file or from shards, tied or untied

    @R11.4
    Scenario Outline: <model> from <files>
      Given the model "<model>"
      And its checkpoint written as <files>
      Then the checkpoint has <output> output layer of its own
      And its logits are those of transformers

      Examples:
        | model        | files               | output |
        | qwen3        | one file            | no     |
        | qwen3        | shards of 100 kB    | no     |
        | qwen3 untied | one file            | an     |
        | qwen3 untied | shards of 100 kB    | an     |
        | llama        | one file            | an     |
        | llama        | shards of 60 kB     | an     |
        | llama tied   | one file            | no     |
        | llama tied   | shards of 100 kB    | no     |
        | qwen2        | one file            | no     |
        | qwen2        | shards of 60 kB     | no     |
        | gemma3       | one file            | no     |
        | gemma3       | shards of 100 kB    | no     |

    @R11.4
    Scenario: A tied model may store its output layer all the same
      Given the model "qwen3"
      And its checkpoint written as one file
      And a copy of "model.embed_tokens.weight" is stored as "lm_head.weight"
      Then its logits are those of transformers

    @R11.4
    Scenario Outline: Of a checkpoint with images, in <files>, the language model is read
      Given the model "gemma3 with images"
      And its checkpoint written as <files>
      Then the checkpoint has no output layer of its own
      And its logits are those of transformers

      Examples:
        | files            |
        | one file         |
        | shards of 100 kB |

  Rule: A checkpoint that does not fit the model is refused by the name of the tensor

    @R11.4
    Scenario Outline: Without <tensor>, in <files>
      Given the model "<model>"
      And its checkpoint written as <files>
      And "<tensor>" is taken out
      When the checkpoint is read
      Then it is refused, naming "<tensor>" as missing

      Examples:
        | model  | files            | tensor                                           |
        | qwen3  | one file         | model.embed_tokens.weight                        |
        | qwen3  | one file         | model.norm.weight                                |
        | qwen3  | one file         | model.layers.1.self_attn.k_norm.weight           |
        | qwen3  | shards of 100 kB | model.layers.1.mlp.up_proj.weight                |
        | qwen3  | shards of 100 kB | model.layers.0.self_attn.v_proj.weight           |
        | llama  | one file         | lm_head.weight                                   |
        | llama  | shards of 100 kB | lm_head.weight                                   |
        | llama  | one file         | model.layers.0.post_attention_layernorm.weight   |
        | qwen2  | one file         | model.layers.1.self_attn.k_proj.bias             |
        | gemma3 | one file         | model.layers.2.post_feedforward_layernorm.weight |
        | gemma3 | shards of 100 kB | model.layers.0.pre_feedforward_layernorm.weight  |

    @R11.4
    Scenario Outline: With <tensor> too many, in <files>
      Given the model "<model>"
      And its checkpoint written as <files>
      And a copy of "<like>" is stored as "<tensor>"
      When the checkpoint is read
      Then it is refused, naming "<tensor>" as having no place

      Examples:
        | model | files            | like                                   | tensor                                 |
        | qwen3 | one file         | model.layers.1.mlp.up_proj.weight      | model.layers.2.mlp.up_proj.weight      |
        | qwen3 | shards of 100 kB | model.norm.weight                      | model.layers.0.self_attn.q_proj.bias   |
        | llama | one file         | model.norm.weight                      | model.layers.0.self_attn.q_norm.weight |

    @R11.4
    Scenario Outline: With <tensor> of shape <found>, in <files>
      Given the model "<model>"
      And its checkpoint written as <files>
      And "<tensor>" has the shape <found>
      When the checkpoint is read
      Then it is refused, naming "<tensor>" with shape <found> where <needed> is needed

      Examples:
        | model | files            | tensor                                 | found     | needed    |
        | qwen3 | one file         | model.layers.0.self_attn.q_proj.weight | [64, 128] | [128, 64] |
        | qwen3 | one file         | model.norm.weight                      | [63]      | [64]      |
        | qwen3 | shards of 100 kB | model.layers.1.mlp.down_proj.weight    | [96, 64]  | [64, 96]  |
        | llama | one file         | lm_head.weight                         | [200, 64] | [211, 64] |
        | llama | shards of 100 kB | model.layers.1.self_attn.k_proj.weight | [16, 64]  | [32, 64]  |

    @R11.4
    Scenario: A shard that is not there
      Given the model "qwen3"
      And its checkpoint written as shards of 100 kB
      And the file "model-00002-of" is lost
      When the checkpoint is read
      Then it is refused, naming "model-00002-of" as not there

    @R11.4
    Scenario: A directory without weights
      Given the model "qwen3"
      And its checkpoint written as one file
      And the file "model.safetensors" is lost
      When the checkpoint is read
      Then it is refused, naming "model.safetensors" as neither

  Rule: A checkpoint is data: no code of it runs, and what cannot be served is refused in a sentence

    @R11.5
    Scenario Outline: A checkpoint with <what>
      Given a checkpoint with <what>
      When I serve it, with "y" for an answer to every question
      Then the command ends with status 2
      And the message says "<sentence>"
      And no code of the checkpoint has run

      Examples:
        | what                                       | sentence                                                                  |
        | code for a family that kvlab does not know | model_type=x: ... never runs the code that its auto_map names             |
        | pickled weights alone                      | pytorch_model.bin may run code ... kvlab reads safetensors alone          |
        | an index that names a file elsewhere       | names ../../other.safetensors; ... file beside the index                  |
        | a million million layers                   | num_hidden_layers=1000000000000: has to be a whole number ... config.json |

  Rule: A decoder that kvlab has none of its own for is computed by transformers, on kvlab's memory

    @R11.6
    Scenario Outline: <family>, in every kind of memory
      Given a small <family> that transformers wrote
      When six prompts of 5 to 50 tokens are served in contiguous slots
      And six prompts of 5 to 50 tokens are served in pages
      And six prompts of 5 to 50 tokens are served in shared pages
      And six prompts of 5 to 50 tokens are served in so few pages that some are preempted
      Then every answer is that of transformers' own generate

      Examples:
        | family     |
        | mistral    |
        | phi3       |
        | olmo2      |
        | gemma2     |
        | granite    |
        | smollm3    |
        | starcoder2 |

    @R29.13
    Scenario Outline: <family>, a mixture of experts, in every kind of memory
      Given a small <family> that transformers wrote
      When six prompts of 5 to 50 tokens are served in contiguous slots
      And six prompts of 5 to 50 tokens are served in pages
      And six prompts of 5 to 50 tokens are served in shared pages
      And six prompts of 5 to 50 tokens are served in so few pages that some are preempted
      Then every answer is that of transformers' own generate

      Examples:
        | family    |
        | qwen3_moe |
        | gpt_oss   |

    @R11.6
    Scenario Outline: A <family> is planned without memory
      Given the config.json of a published <family>
      When I plan for that directory in 32 GiB
      Then a token takes <bytes> bytes and a block of 16 tokens <block>
      And the planner says "<parameters> parameters"

      Examples:
        | family     | bytes  | block   | parameters    |
        | mistral    | 131072 | 2097152 | 7,241,732,096 |
        | phi3       | 393216 | 6291456 | 3,821,079,552 |
        | olmo2      | 524288 | 8388608 | 6,888,624,128 |
        | gemma2     | 106496 | 1703936 | 2,614,341,888 |
        | granite    | 524288 | 8388608 | 6,738,415,616 |
        | smollm3    | 73728  | 1179648 | 3,075,098,624 |
        | starcoder2 | 30720  | 491520  | 3,030,371,328 |

    @R11.6
    Scenario Outline: A <family> is refused
      Given the config.json of a published <family>
      When I plan for that directory in 32 GiB
      Then the command fails without a traceback
      And the message says "model_type=<family>: <reason> ... config.json"

      Examples:
        | family | reason                                                            |
        | bart   | has an encoder                                                    |
        | mamba  | has layers (linear_attention) with a state or a mask of their own |
        | bloom  | never calls transformers' attention interface                     |

  Rule: Matrices in 12 bits a number are exact

    @R11.7 @avx512
    Scenario: The tokens are those of 16 bits
      When a tiny model is run with "executor.dtype=bfloat16 executor.weights=plain" and with "executor.dtype=bfloat16 executor.weights=compact"
      Then both runs had the same prompts and produced the same tokens
      And a number of a matrix takes 16 bits in memory with "executor.weights=plain", and 12 with "executor.weights=compact"

    @R11.7
    Scenario Outline: <settings>
      When I run "<settings>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | settings                                                                  | message                                                                        |
        | executor.weights=compact executor.dtype=float32                           | executor.weights=compact: is for executor.dtype=bfloat16, not float32          |
        | executor.weights=compact executor.dtype=bfloat16 executor.kernels=false   | executor.weights=compact: is computed by a kernel ... executor.weights=auto    |
        | executor.weights=compact executor=simulated hardware=h100_sxm             | executor.weights=compact: is a format of kvlab's kernels for CPUs              |

  Rule: Products of int8 with int8 say what multiplies them, and what they cost

    @R31.13
    Scenario: Activations in int8 beside weights in int8
      When I run "executor.dtype=bfloat16 executor.weights=int8 workload.num_requests=3" on a tiny model
      And I run "executor.dtype=bfloat16 executor.weights=int8_w8a8 workload.num_requests=3" on a tiny model
      Then all 3 requests were completed
      And the message says "in int8_w8a8"
      And the message says "products in int8 by"
      And each has more "quality/kl_mean" than the one before
      And a number of a matrix takes 8 bits in memory with "executor.weights=int8", and 8 with "executor.weights=int8_w8a8"

    @R31.14
    Scenario Outline: No products in integers with <settings>
      When I run "<settings>" on a tiny model
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | settings                                                                  | message                                                                        |
        | executor.weights=int8_w8a8 executor.dtype=float32                         | executor.weights=int8_w8a8: is for executor.dtype=bfloat16, not float32        |
        | executor.weights=int8_w8a8 executor.dtype=bfloat16 executor.kernels=false | executor.weights=int8_w8a8: is computed by a kernel ... executor.weights=auto  |
        | executor.weights=int8_w8a8 executor=simulated hardware=h100_sxm           | executor.weights=int8_w8a8: is a format of kvlab's kernels for CPUs            |
