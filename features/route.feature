Feature: A proxy before several servers
  `kvlab route` is one address for several servers of OpenAI's protocol; the routers of simulated fleets choose among them.

  Rule: Each request goes to one server, as it is

    @R28.7
    Scenario Outline: <router> sends <what>
      Given 3 servers, of which the first says that <running> requests run there
      And a proxy before them with "fleet.router=<router> fleet.load_s=0.01"
      When clients ask for <prompts> through it
      Then the servers were asked <counts> times

      Examples:
        | router         | what                                | running | prompts       | counts |
        | round_robin    | requests in turn                    | 0       | A A A A A A   | 2 2 2  |
        | least_requests | one after the other to the first    | 0       | A A A         | 3 0 0  |
        | cache_aware    | a prompt to where it was            | 0       | A B C B B C A | 2 3 2  |
        | estimated      | a prompt to one server              | 0       | A A A A       | 4      |
        | sessions       | a conversation to one server        | 0       | A B C A       | 4      |
        | vllm           | nothing to a server with many       | 9       | A B A B       | 0 4 0  |

    @R28.7
    Scenario Outline: <what> comes as the server sent it
      Given a proxy before a server that answers <answer>
      When a client asks for a <kind> through it
      Then the client got status <status> and the bytes of the server

      Examples:
        | what           | answer        | kind       | status |
        | a whole answer | in whole      | completion | 200    |
        | a stream       | in a stream   | chat       | 200    |
        | an error       | with an error | completion | 400    |

    @R28.7
    Scenario: A stream is not held back
      Given a proxy before a server that answers in a stream that pauses
      When a client asks for a chat through it
      Then the client had the first part while the server paused

    @R28.7
    Scenario: KV events tell where a prompt is
      Given 2 kvlab servers that publish KV events, and a proxy that hears them
      When the second server has completed a prompt, for somebody else
      And a client asks for that prompt through the proxy
      Then the second server found what it had

    @R28.7
    Scenario Outline: <what> is refused
      Given servers of "<models>"
      When I route with "<settings>"
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | what                       | models | settings                                    | message |
        | No server                  |        | server.port=0                               | upstreams=null: must be URLs, such as [http://127.0.0.1:8000, |
        | A server that is down      |        | upstreams=http://127.0.0.1:9                | none is up: http://127.0.0.1:9: Cannot connect |
        | A server named twice       |        | upstreams=[http://a,http://a/v1/]           | names a server twice |
        | Unequal models             | m n    | fleet.router=random                         | serves n (1000 tokens), and ...m (1000 tokens); one router is for equal models |
        | A router that knows all    | m m    | fleet.router=oracle                         | fleet.router=oracle: with an exact view sees what no proxy can |
        | What no server knows       | m m    | fleet.router=oracle fleet.prefixes=memory   | asks for what is not known behind a proxy: work_tokens |
        | Events that nobody sends   | m m    | fleet.router=precise                        | needs events=[tcp://...], one for each of upstreams, and tokenizer= |
        | Events that nobody reads   | m m    | events=[tcp://a,tcp://b]                    | are not read by fleet.router=round_robin |
        | A simulated fleet's delays | m m    | fleet.events_ms=5                           | fleet.events_ms=5.0: is of simulated fleets; a proxy has fleet.router |
        | An unknown router          | m m    | fleet.router=best                           | fleet.router=best |
        | Another router in a replay | m m    | fleet.router=random replay=decisions.jsonl  | fleet.router=random: is as decisions.jsonl has it; leave it out |
        | An unknown setting         | m m    | fleet.rooter=best                           | fleet.rooter=best: unknown; did you mean fleet.router? |
        | A setting without its section | m m | port=8100                                   | port=8100: unknown; did you mean server.port? known: |

  Rule: What had not begun is not lost, and nothing is answered twice

    @R28.8
    Scenario: A server dies before the first byte
      Given 3 servers, of which the first dies when it is asked
      And a proxy before them with "fleet.router=round_robin"
      When clients ask for A through it
      And the proxy has found the first one down
      And clients ask for A A A A A through it
      Then all have their whole answers
      And the servers were asked 1 3 3 times
      And the proxy says of the first that it is down, and of 1 request that it went to another

    @R28.8
    Scenario: A server hangs before the first byte
      Given 3 servers, of which the first hangs when it is asked, and is given up after 0.2 s
      And a proxy before them with "fleet.router=round_robin"
      When clients ask for A A A through it
      Then all have their whole answers
      And the servers were asked 1 1 2 times
      And the first one saw that its client left

    @R28.8
    Scenario: A server dies behind the first byte
      Given 3 servers, of which the first breaks off when it is asked
      And a proxy before them with "fleet.router=round_robin"
      When clients ask for A through it
      Then the last client saw that its answer broke off
      And the servers were asked 1 0 0 times

    @R28.8
    Scenario: A server comes back
      Given 3 servers, of which the first dies when it is asked
      And a proxy before them with "fleet.router=round_robin"
      When clients ask for A A A through it
      And the first server begins again
      And clients ask for A A A through it
      Then all have their whole answers
      And the first server was asked again

    @R28.8
    Scenario: A server drains
      Given 3 servers, of which the first says that 0 requests run there
      And a proxy before them with "fleet.router=round_robin"
      When the first one is drained
      And clients ask for A A A A through it
      Then the servers were asked 0 2 2 times
      When the first one is drained no more
      And clients ask for A A A through it
      Then the first server was asked again

  Rule: A decision can be made again

    @R28.9
    Scenario Outline: Decisions of <router> are made again
      Given 3 servers, of which the first says that 2 requests run there
      And a proxy before them with "fleet.router=<router> <settings> fleet.load_s=0.01 seed=3", which records
      When 24 requests of 5 prompts go through it, 6 at a time
      Then "kvlab route" makes the 24 decisions of <router> again
      And it says so where one was another

      Examples:
        | router         | settings                                      |
        | round_robin    |                                               |
        | random         |                                               |
        | power_of_two   |                                               |
        | least_requests |                                               |
        | sessions       |                                               |
        | vllm           |                                               |
        | load           | fleet.weights.kv=1.5                          |
        | cache_aware    | fleet.memory_blocks=9                         |
        | estimated      |                                               |
        | sticky         | fleet.prefixes=memory                         |
        | dynamo         | fleet.prefixes=memory fleet.temperature=0.7   |
