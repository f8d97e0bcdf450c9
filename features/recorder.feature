Feature: A recorder before a server
  `kvlab record` stands between clients and any server of OpenAI's protocol, changes nothing, and leaves a trace.

  Rule: Traffic goes through as it is

    @R27.4
    Scenario Outline: <what> comes as the server sent it
      Given a recorder before a server that answers <answer>
      When a client asks for a <kind> through it
      Then the client got status <status> and the bytes of the server
      And the trace has <lines> requests

      Examples:
        | what                      | answer                  | kind       | status | lines |
        | a whole answer            | in whole                | completion | 200    | 1     |
        | a stream                  | in a stream             | chat       | 200    | 1     |
        | an error                  | with an error           | completion | 400    | 0     |
        | a page of HTML            | with HTML               | completion | 200    | 1     |
        | a path that is not traced | in whole                | list       | 200    | 0     |
        | an answer in HTTP/1.0     | in whole, in HTTP/1.0   | completion | 200    | 1     |

    @R27.4
    Scenario: A stream is not held back
      Given a recorder before a server that answers in a stream that pauses
      When a client asks for a chat through it
      Then the client had the first part while the server paused

    @R27.4
    Scenario: A client reads what the server said, and the trace what it cost
      Given a recorder before a server that answers in a stream
      When a client asks for a chat through it
      Then the trace has 1 requests
      And the last has 2 output tokens, 16 cached tokens, a first token and an end, and ended by "stop"
      And the trace has neither its text nor its key

    @R27.4
    Scenario Outline: <what> are counted as the server gave them
      Given a recorder before a server that answers <answer>
      When a client asks through it for {<asked>}
      Then the trace has prompts of <prompts> tokens with outputs of <outputs>

      Examples:
        | what                             | answer                             | asked                              | prompts | outputs |
        | Answers that speak of data:      | in whole, of data:                 | "prompt": "abcd"                   | 1       | 7       |
        | Answers in gzip                  | in whole, in gzip                  | "prompt": "abcd"                   | 1       | 7       |
        | Streams of CR LF with pings      | in a stream with CR LF and pings   | "prompt": "abcd"                   | 1       | 2       |
        | Samples                          | in whole, with 3 samples           | "prompt": "abcd", "n": 3           | 1 1 1   | 3 3 3   |
        | Samples cut at their limit       | in whole, with 3 samples, cut      | "prompt": "abcd", "n": 3, "max_tokens": 2 | 1 1 1 | 2 2 5 |
        | Several prompts                  | in whole, with 2 samples           | "prompt": ["abcd", "efghijklm"]    | 1 3     | 3 3     |
        | Token ids in a list of prompts   | in whole                           | "prompt": [[100200, 100201]]       | 2       | 7       |
        | A limit that is written as 9.0   | in whole                           | "prompt": "abcd", "max_tokens": 9.0 | 1      | 7       |
        | Tools, a part of the prompt      | in whole                           | "messages": [{"role": "user"}], "tools": [{"type": "function"}] | 10 | 7 |

    @R27.4
    Scenario: A client that leaves before its answer
      Given a recorder, as a process, before a server that answers in a stream that pauses
      When a client leaves while the server pauses
      Then the server saw that its client left
      And the trace has the request, which ended by "abort", and the recorder logged nothing

    @R27.4
    Scenario: A server that dies in the midst of a stream
      Given a recorder before a server that answers in a stream that breaks
      When a client asks for a chat through it
      Then the client saw that the stream broke
      And the last has 1 output tokens, 0 cached tokens, a first token and an end, and ended by "abort"

    @R27.4
    Scenario: A server that is not there
      Given a recorder before no server
      When a client asks for a completion through it
      Then the client got status 502 and "cannot be reached"
      And the recorder's health is 503

    @R27.4
    Scenario: A trace that cannot be written stops no traffic
      Given a recorder before a server that answers in whole
      And the trace cannot be written
      When a client asks for a completion through it
      Then the client got status 200 and the bytes of the server
      And the recorder's health is 200 and says that 1 request is lost: "Is a directory"

    @R27.4
    Scenario: A recorder that is killed leaves what it had seen
      Given a recorder, as a process, before a server that answers in whole
      When a client asks for 5 completions of one prompt through it
      And the recorder is killed
      Then the trace comes to have 5 requests, and one of their prompts again and again

    @R27.4
    Scenario: The server says how many tokens its prompts have
      Given a recorder that asks the server for tokens
      When a client asks for a chat through it
      Then the server was asked with the client's key, and the trace has the 40 tokens that it said

  Rule: Text is kept by those who ask for it

    @R27.9
    Scenario Outline: A <kind> is in the trace as text
      Given a recorder that keeps text before a server that answers <answer>
      When a client asks for a <kind> through it
      Then the trace says that it has text, and has the client's prompt and "An answer", and not its key
      And nobody but its owner can read the trace

      Examples:
        | kind       | answer      |
        | completion | in whole    |
        | chat       | in a stream |

    @R27.9
    Scenario: Its text goes with it, and a run does not need it
      Given a recorder that keeps text before a server that answers in whole
      When a client asks for 2 completions of one prompt through it
      Then as Parquet it has the same text
      When I run the recorded trace with "workload=recorded model.max_seq_len=512" on a tiny model
      Then the command succeeds
      And it served 2 requests

  Rule: What was recorded is a workload

    @R27.4
    Scenario: It is run, and finds what prompts have in common
      Given a recorder before a server that answers in whole
      When a client asks for 3 completions of one prompt through it
      And I run the recorded trace with "workload=recorded model.max_seq_len=512" on a tiny model
      Then the command succeeds
      And it served 3 requests

    @R27.4
    Scenario Outline: <what> is refused
      When I record with "<settings>"
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | what                   | settings                                      | message |
        | No server              | port=0                                        | upstream=null: must be a URL, such as http://127.0.0.1:8000 |
        | A server without http  | upstream=localhost:8000                       | upstream=localhost:8000: must be a URL |
        | A port that is none    | upstream=http://a port=70000                  | port=70000: |
        | An unknown setting     | upstream=http://a prot=1                      | prot=1: |
        | A trace that is there  | upstream=http://a to=/dev/null                | to=/dev/null: is there; name another file, or move that one away |
        | A trace that cannot be | upstream=http://a to=/dev/null/a.jsonl        | to=/dev/null/a.jsonl: cannot be written: Not a directory |
        | A short key            | upstream=http://a to=a.jsonl hash_with=/dev/null | hash_with=/dev/null: has 0 bytes; needed: 16 to 64 |
