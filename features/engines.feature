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

    @R19.3
    Scenario: An address where nothing answers
      When I run "engine=openai engine.url=http://127.0.0.1:1" on a tiny model
      Then the command fails without a traceback
      And the message says "engine.url=http://127.0.0.1:1: no server answers there"
      And the tracked run is "FAILED"

    @R19.4
    Scenario: An engine that is not installed
      When I run "engine=vllm" on a tiny model
      Then the command fails without a traceback
      And the message says "engine=vllm: ... has no vllm; give the interpreter of an environment that has it"
      And the tracked run is "FAILED"

    @R19.4
    Scenario: An engine's interpreter that is not there
      When I run "engine=transformers_static engine.python=/no/python" on a tiny model
      Then the command fails without a traceback
      And the message says "engine.python=/no/python: is no interpreter"
