Feature: Watch the prefix cache of a running server
  `kvlab watch` hears a server's KV events, vLLM's or kvlab's, and says what it evicted and had to compute again.

  Rule: It knows what the server has

    @R27.7
    Scenario Outline: The pool of a <kind> server
      Given a client of a <kind> server that publishes KV events
      And 12 prompts that begin alike were completed in a cache that has no room for all
      When I watch it
      Then the command succeeds
      And it knows as many blocks as the server's index has, and saw some evicted
      And the message says "blocks stored,"
      And the message says "its own metrics:"

      Examples:
        | kind      |
        | simulated |
        | computed  |

    @R27.7
    Scenario: Recorded requests are held against the events
      Given a client of a simulated server that publishes KV events
      And 12 prompts that begin alike were completed through a recorder
      When I watch it with the recorder's trace
      Then the command succeeds
      And the message says "12 recorded requests: the server found"
      And the message says "Both agree in 12 requests"
      And what the server found is what the ledger finds under lru, and no more than belady

  Rule: What it cannot know is said

    @R27.7
    Scenario: A server that does not say what it found
      Given a client of a simulated server that publishes KV events
      And 12 prompts that begin alike were completed through a recorder
      And the recorder's trace does not say what was found
      When I watch it with the recorder's trace
      Then the command succeeds
      And the message says "12 recorded requests do not say what the server found"

    @R27.7
    Scenario: What was seen is told whatever becomes of the trace
      Given a client of a simulated server that publishes KV events
      And 12 prompts that begin alike were completed through a recorder
      And the recorder's trace is gone
      When I watch it at /v1 with the recorder's trace
      Then the command fails without a traceback
      And the message says "cannot be read: No such file"
      And of "blocks stored, ... its own metrics:" it is said once

    @R27.7
    Scenario: Addresses that do not answer
      Given a publisher that sends the batches 0, 1 and 4 of events
      When I watch it with "replay=tcp://127.0.0.1:1 url=http://127.0.0.1:1"
      Then the message says "replay=tcp://127.0.0.1:1: gave no answer; what was missed is not known"
      And the message says "url=http://127.0.0.1:1: gives no /metrics ([Errno 111] Connection refused)"

    @R27.7
    Scenario: Batches that were missed
      Given a publisher that sends the batches 0, 1 and 4 of events
      When I watch it
      Then the message says "2 batches were missed, in 1 gaps: what they had is not known"

    @R27.7
    Scenario: Events of another kind
      Given a publisher that sends something else
      When I watch it
      Then the command fails without a traceback
      And the message says "no KV events as vLLM 0.32 has them"

    @R27.7
    Scenario Outline: It refuses <what>
      When I watch with "<settings>"
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | what                    | settings | message |
        | no address              | url=http://127.0.0.1:1 | events=null: name where the server publishes its KV events |
        | an address that is none | events=nowhere seconds=0 | events=nowhere: |
        | a trace without its key | events=tcp://127.0.0.1:1 trace=a.jsonl | trace=a.jsonl: is read with the key that its hashes have |
        | an unknown setting      | events=tcp://127.0.0.1:1 sconds=1 | did you mean seconds? |
        | an address where nobody is | events=tcp://127.0.0.1:1 seconds=0 | events=tcp://127.0.0.1:1: no publisher was reached; |
        | a time that has passed  | events=tcp://127.0.0.1:1 seconds=-1 | seconds=-1.0: must be a number, at least 0 |
