Feature: Answers that programs read
  A schema, a grammar or tools say what an answer looks like, and no answer looks otherwise, however small the model.

  Background:
    Given a client of a server of SmolLM2

  Rule: An answer follows what it is asked to follow

    @R18.14
    Scenario Outline: JSON of a schema, <how>
      When it asks for a person as JSON, with {<fields>}
      Then each of the <count> answers is a person, and ended by "stop"

      Examples:
        | how             | fields                                             | count |
        | greedy          |                                                    | 1     |
        | sampled         | "temperature": 1, "seed": 1                        | 1     |
        | three samples   | "temperature": 1, "seed": 1, "n": 3                | 3     |
        | streamed        | "stream": true                                     | 1     |
        | with penalties  | "repetition_penalty": 1.2, "frequency_penalty": 0.1 | 1     |

    @R18.14
    Scenario Outline: <what>, with vLLM's structured_outputs
      When it completes {"prompt": "The capital of France is", "max_tokens": 60, "structured_outputs": <outputs>}
      Then it gets a text like "<pattern>"

      Examples:
        | what                  | outputs                                                  | pattern                  |
        | A choice              | {"choice": ["Berlin", "Paris"]}                          | Paris                    |
        | A regular expression  | {"regex": "[A-Z][a-z]{2,8}!"}                            | [A-Z][a-z]{2,8}!         |
        | A grammar             | {"grammar": "start: \\"a\\"? \\"b\\"+"}                  | a?b+                     |
        | A schema              | {"json": {"enum": ["x", "y"]}}                           | "[xy]"                   |
        | Any object            | {"json_object": true, "whitespace_pattern": ""}          | \\{.*                    |

    @R18.14
    Scenario: Any object, as OpenAI's response_format
      When it chats {"messages": [{"role": "user", "content": "Name a city and its country as JSON."}], "max_tokens": 60, "response_format": {"type": "json_object"}}
      Then it gets a text like "\{.*"

    @R18.14
    Scenario: A free answer beside it is as it is alone
      When 4 clients ask at once, of which every second wants a person as JSON
      Then each free answer is as alone, and each other is a person

    @R18.14
    Scenario Outline: <what> is refused
      When it posts /v1/chat/completions {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, <fields>}
      Then it is refused with 400 for <field>: "<message>"

      Examples:
        | what                       | fields | field | message |
        | A schema that is none      | "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "text"}}} | response_format | response_format: the JSON schema cannot be followed: Invalid type: text |
        | A format without a schema  | "response_format": {"type": "json_schema"} | response_format | response_format has no schema; needed: {"type": "json_schema", "json_schema": |
        | An unknown format          | "response_format": {"type": "xml"} | response_format | response_format.type='xml': must be text, json_object or json_schema |
        | A broken expression        | "structured_outputs": {"regex": "(a"} | structured_outputs | structured_outputs.regex: the regular expression cannot be followed |
        | Two at once                | "structured_outputs": {"regex": "a", "choice": ["b"]} | structured_outputs | structured_outputs has regex, choice; needed: one of json, regex, choice, grammar, json_object |
        | None of them               | "structured_outputs": {} | structured_outputs | structured_outputs has nothing; needed: one of |
        | A structural tag           | "structured_outputs": {"structural_tag": "a"} | structured_outputs | structured_outputs has structural_tag; needed: one of |
        | Both fields                | "response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["b"]} | structured_outputs | response_format and structured_outputs: give one of them |
        | An answer without an end   | "response_format": {"type": "json_object"}, "ignore_eos": true | ignore_eos | the grammar says where the output ends |

  Rule: Tools are called

    @R18.15
    Scenario Outline: A call that has to come, <how>
      When it asks for the weather in Paris with tools, with {"tool_choice": <choice>, <fields>}
      Then it calls get_weather for a city

      Examples:
        | how                   | choice                                                    | fields          |
        | of any function       | "required"                                                | "n": 1          |
        | of one                | {"type": "function", "function": {"name": "get_weather"}} | "n": 1          |
        | of any, streamed      | "required"                                                | "stream": true  |
        | of one, streamed      | {"type": "function", "function": {"name": "get_weather"}} | "stream": true  |
        | of one at most        | "required"                                                | "parallel_tool_calls": false |

    @R18.15
    Scenario Outline: The model may answer in words, <how>
      When it asks for the weather in Paris with tools, with {"tool_choice": <choice>}
      Then it gets words and no call

      Examples:
        | how                 | choice |
        | if it wants         | "auto" |
        | and has to          | "none" |

    @R18.15
    Scenario: What a tool answered is a part of the conversation
      When it chats about a call of get_weather whose answer was "18 degrees"
      Then its prompt has the tools, the call and "18 degrees"

    @R18.15
    Scenario Outline: Of tools, <what> is refused
      When it posts /v1/chat/completions {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, <fields>}
      Then it is refused with 400 for <field>: "<message>"

      Examples:
        | what                      | fields | field | message |
        | a choice without tools    | "tool_choice": "required" | tool_choice | tool_choice needs tools |
        | a tool that is none       | "tools": [{"type": "web_search"}] | tools | tools[0] is no function; needed: {"type": "function" |
        | a function without a name | "tools": [{"type": "function", "function": {}}] | tools | tools[0] has no name, or parameters that are no schema |
        | a function that is not    | "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": "g"}} | tool_choice | must be none, auto, required, or a function that tools has |
        | a schema that is none     | "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}], "tool_choice": "required" | tools | tools: the JSON schema cannot be followed |
        | a form beside a call      | "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required", "response_format": {"type": "json_object"} | tool_choice | leave response_format and structured_outputs out |

    @R18.15
    Scenario: A parser that nobody knows is refused before the model is loaded
      When a server is started with "model=qwen3_tiny server.tool_call_parser=pythonic"
      Then the start ends with 2 and "server.tool_call_parser=pythonic"

  Rule: A simulated device follows nothing, and says so

    @R18.14
    Scenario: It computes no tokens that could follow a schema
      Given a client of a simulated server of Llama 3.1 8B
      When it completes {"model": "llama3_1_8b", "prompt": "Hi", "max_tokens": 1, "structured_outputs": {"choice": ["a"]}}
      Then it is refused with 400 for structured_outputs: "a simulated device follows no grammar; leave it out"
