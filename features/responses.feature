Feature: OpenAI's newer protocol, and what gateways ask of a server
  Clients that know /v1/responses alone get texts and streams from it; load balancers and operators have vLLM's routes.

  Background:
    Given a client of a server of SmolLM2

  Rule: /v1/responses gives the words of a chat

    @R18.11
    Scenario: OpenAI's client reads a text, its usage and its end
      When OpenAI's client asks for a response to "What is the capital of France?" of at most 20 tokens
      Then the response is completed, says "The capital of France is Paris.", and counts 37 and 8 tokens

    @R18.11
    Scenario: A text that is cut is incomplete
      When OpenAI's client asks for a response to "What is the capital of France?" of at most 3 tokens
      Then the response is incomplete, says "The capital of", and counts 37 and 3 tokens

    @R18.11
    Scenario: A stream has the events of the protocol, in order, and joins to the same text
      When OpenAI's client streams a response to "What is the capital of France?" of at most 20 tokens
      Then its events are created, in_progress, output_item.added, content_part.added, 8 deltas, output_text.done, content_part.done, output_item.done, completed
      And the deltas join to "The capital of France is Paris."

    @R18.14
    Scenario: A text has the form of a schema
      When OpenAI's client asks for a response that is a person, of at most 60 tokens
      Then the response's text is a person

    @R18.11
    Scenario Outline: Of <what> it is said that it is not supported
      When it posts /v1/responses <body>
      Then it is refused with 400 for <field>: "<message>"

      Examples:
        | what               | body                                                                           | field                | message |
        | a stored response  | {"input": "a", "previous_response_id": "resp_1"}                               | previous_response_id | is not supported; leave it out |
        | tools              | {"input": "a", "tools": [{"type": "web_search"}]}                              | tools                | is not supported; leave it out |
        | a picture          | {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}            | input                | input[0] is no message of text |
        | no input           | {"input": []}                                                                  | input                | input is empty |

  Rule: Gateways and operators have their routes

    @R18.12
    Scenario: Probes, load, settings and the tokenizer are answered
      Then /ping is ready, /load counts 0 requests, /server_info has the model, and /tokenizer_info the chat template
