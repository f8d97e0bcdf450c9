Feature: Engines that are not kvlab's
  The same workload, figures and records, whichever engine serves the requests.

  Rule: Any server of OpenAI's protocol is measured as a client sees it

    @R19.1
    Scenario: A run of a server has what a client sees and what the server says of itself
      Given a server of OpenAI's protocol
      When its address is given to a run
      Then the command succeeds
      And the message says "engine: model m, address ... version 9.9"
      And the message says "first token, p50 ... preemptions"
      And nothing is said of "unused part of blocks in use"
      And its requests have the column "ttft_ms" and not "queue_ms"
      And the tracked run is "FINISHED"
      And they equal those of summary.json
      And its artifacts are "requests.parquet series.parquet summary.json"

    @R19.1
    Scenario: A run of kvlab serve has the tokens of a run in process, and what the server says of its memory
      Given a tiny checkpoint with words as a directory
      When it is served by kvlab serve, and its address is given to a run
      Then it had the requests of a run in process, and its tokens
      And its metric "kv/prefix_hit_rate" is that of the run in process
      And they equal those of summary.json
      And its artifacts are "requests.parquet series.parquet summary.json"

    @R19.2
    Scenario: Requests that were sent late make a run invalid
      Given a server of OpenAI's protocol
      And a client that may send nothing late
      When its address is given to a run with "workload.arrival=uniform workload.rate=100"
      Then the command ends with status 1
      And the message says "failed: invalid: requests were sent ... ms late (p99; at most 0)"
      And the tracked run is "FAILED"

  Rule: What does not work is a sentence, and the run is marked failed

    @R19.3
    Scenario Outline: A server that will not do
      Given a server of OpenAI's protocol that <behaves>
      When its address is given to a run with "<settings>"
      Then the command fails without a traceback
      And the message says "<sentence>"
      And the tracked run is "FAILED"

      Examples:
        | behaves                     | settings             | sentence                                                |
        | wants a key                 | engine.version=9.9   | the server wants a key; give it as engine.api_key=      |
        | is another version          | engine.version=1.0   | is version 9.9, and engine.version=1.0 asks for another |
        | refuses a parameter         | engine.version=9.9   | the server refused the first request: 400: Unrecognized |
        | ends after the first answer | engine.version=9.9   | it ended while it had requests to answer                |
        | hangs                       | engine.timeout_s=1   | no complete answer within engine.timeout_s=1 seconds    |

    @R19.3 @tracked
    Scenario: An address where nothing answers
      When I run "engine=openai engine.url=http://127.0.0.1:1" on a tiny model
      Then the command fails without a traceback
      And the message says "engine.url=http://127.0.0.1:1: no server answers there"
      And the tracked run is "FAILED"

    @R19.4 @tracked
    Scenario: An engine that is not installed
      Given a cache without engines
      When I run "engine=vllm" on a tiny model
      Then the command fails without a traceback
      And the message says "engine=vllm: ... has no vllm; give the interpreter of an environment that has it"
      And the tracked run is "FAILED"

    @R19.4
    Scenario: An engine's interpreter that is not there
      When I run "engine=transformers_static engine.python=/no/python" on a tiny model
      Then the command fails without a traceback
      And the message says "engine.python=/no/python: is no interpreter"

  Rule: An engine in a process of its own serves the same requests from the same bytes

    @R19.4 @slow
    Scenario Outline: <engine> serves a checkpoint
      Given a tiny checkpoint with words as a directory
      When it is run with "engine=<engine> <options>"
      Then it had the requests of a run in process, and its tokens
      And its metric "<metric>" is that of the run in process
      And no process of it is left

      Examples:
        | engine                  | options                       | metric             |
        | transformers_static     |                               | tokens/output      |
        | transformers_continuous | +engine.options.page_size=16  | capacity/kv_bytes  |

    @R19.4 @slow
    Scenario: vLLM, whose attention has no heads of 8, serves a checkpoint
      Given a tiny checkpoint with words and heads of 32 as a directory
      When it is run with "engine=vllm_eager +engine.options.block_size=32"
      Then it had the requests of a run in process, and its tokens
      And no process of it is left

    @R31.11 @slow
    Scenario: llama.cpp serves a checkpoint that is written for it as GGUF
      Given a tiny checkpoint with words as a directory
      When it is run with "engine=llamacpp"
      Then it had the requests of a run in process, and its tokens
      And its metric "capacity/kv_bytes" is that of the run in process
      And no process of it is left

    @R31.12
    Scenario Outline: A model that llama.cpp would compute differently
      When I run "engine=llamacpp <settings>" on a tiny model
      Then the command fails without a traceback
      And the message says "<sentence>"

      Examples:
        | settings                                          | sentence                                                          |
        | model=gemma3_tiny                                 | model.family=gemma3_text: is not written as GGUF; llama, qwen2    |
        | +model.architecture.hidden_act=gelu_pytorch_tanh  | has the activation gelu_pytorch_tanh, which llama.cpp does not    |
        | +engine.options.weights=Q2_K                      | engine.options.weights=Q2_K: unknown; known: F32, F16, BF16, Q8_0 |

    @R31.10
    Scenario: A build of llama.cpp that fails
      Given a compiler that fails with "ninja: build stopped: subcommand failed."
      When I run "kvlab peers install llamacpp"
      Then the command fails without a traceback
      And the message says "llama-cpp-python==... failed: ninja: build stopped: subcommand failed."
      And there is no environment

    @R19.4 @slow
    Scenario Outline: An engine in a process that <fails>
      Given a tiny checkpoint with words as a directory
      When it is run with "engine=transformers_static <option>"
      Then the command fails without a traceback
      And the message says "engine=transformers_static: <sentence>"
      And the tracked run is "FAILED"
      And no process of it is left

      Examples:
        | fails     | option                       | sentence                                                                |
        | fails     | +engine.options.bloks=1      | the engine failed: TypeError: unknown parameter bloks; known: batch     |
        | hangs     | engine.start_timeout_s=0.001 | the engine was not ready within engine.start_timeout_s=0.001 seconds    |
