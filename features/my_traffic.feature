Feature: Traffic of one's own
  What others logged or measured becomes a workload: `kvlab import` makes a trace of it, which every command takes.

  Rule: A file is recognised, and becomes a trace

    @R27.1
    Scenario Outline: <what> is imported with its times, lengths and what prompts have in common
      Given a file "<file>" of <what>
      When I import "<file>"
      Then the command succeeds
      And the message says "<what>, 3 requests, <prompt> prompt tokens, 12 output tokens, in 2 s (1.5 a second)"
      And the message says "run it: kvlab run workload=recorded workload.path="

      Examples:
        | what                          | file        | prompt |
        | Azure's trace of LLM inference | azure.csv   | 144    |
        | BurstGPT's trace              | burst.csv   | 144    |
        | Mooncake's trace              | moon.jsonl  | 1,344  |
        | a timed trace of vLLM         | timed.jsonl | 144    |
        | a table of requests           | own.csv     | 144    |
        | a table of requests           | own.jsonl   | 144    |
        | a result of vllm bench serve  | bench.json  | 144    |
        | records of AIPerf             | aiperf.jsonl | 144   |
        | a report of GuideLLM          | guide.json  | 144    |
        | a report of inference-perf    | perf.json   | 144    |
        | OpenTelemetry spans of requests | spans.json | 144   |
        | OpenTelemetry spans of requests | indented.json | 144 |
        | Dynamo's request trace        | dynamo.jsonl | 144   |
        | a log of vLLM                 | vllm.log    | 144    |

    @R27.1
    Scenario Outline: Of <what> each request is counted once
      Given a file "<file>" of <what>
      When I import "<file>"
      Then the command succeeds
      And the message says "<requests>, in <time>"

      Examples:
        | what                             | file       | requests | time |
        | streams and samples that vLLM logged at New Year | chats.log | 4 requests, 192 prompt tokens, 12 output tokens | 3 s |
        | an agent's, its clients' and its server's spans  | agent.json | 2 requests, 144 prompt tokens, 12 output tokens | 2 s |

    @R27.1
    Scenario: A proxy's log of chats has its times and counts
      Given a file "litellm.jsonl" of what LiteLLM logs of three chats
      When I import "litellm.jsonl"
      Then the trace's requests arrive at 0, 0.5, 2 s
      And the message says "12 output tokens"
      And the message says "the file counts 99 prompt tokens; tokenizer=WHERE, that of its model, would"

    @R27.1
    Scenario: Files of two days become two traces
      Given a file "log.2026-11-25.csv" with "time,prompt_tokens,output_tokens" and 5,7,1; 6.5,8,2; 7,9,3
      And a file "log.2026-11-26.csv" with "time,prompt_tokens,output_tokens" and 5,7,1; 6.5,8,2; 7,9,3
      When I import "log.2026-11-25.csv"
      And I import "log.2026-11-26.csv"
      Then "log.2026-11-25.trace.jsonl" and "log.2026-11-26.trace.jsonl" have the same times and lengths

    @R27.1
    Scenario: The command that runs a trace is one that a shell takes
      Given a file "my log, a=b.csv" with "time,prompt_tokens" and 5,7
      When I import "my log, a=b.csv"
      Then the message says "run it: kvlab run workload=recorded 'workload.path="my log, a=b.trace.jsonl"'"

    @R27.1
    Scenario: The command that runs a trace has the context that its longest request needs
      Given a file "long.csv" with "time,prompt_tokens,output_tokens" and 0,2000,90; 1,1800,300
      When I import "long.csv"
      Then the message says "run it: kvlab run workload=recorded workload.path=long.trace.jsonl model.max_seq_len=2100"

    @R27.1
    Scenario Outline: It has room for outputs that are drawn, <that>
      Given a file "log.csv" with "<columns>" and <rows>
      When I import "log.csv"
      Then the message says "model.max_seq_len=<context>"

      Examples:
        | that                         | columns                       | rows              | context |
        | the longest that there are   | time,prompt_tokens            | 0,2000; 1,1800    | 6096    |
        | no longer than was asked for | time,prompt_tokens,max_tokens | 0,2000,90; 1,20,9 | 2090    |

    @R27.1
    Scenario Outline: What was imported to <trace> is served as the file itself is
      Given a file "moon.jsonl" of Mooncake's trace
      When I import "moon.jsonl" with "to=<trace>"
      And I run the trace "<trace>" with "workload=recorded model.max_seq_len=512" on a tiny model
      And I run the trace "moon.jsonl" with "workload=mooncake model.max_seq_len=512" on a tiny model
      Then both served the same requests

      Examples:
        | trace               |
        | moon.trace.jsonl.gz |
        | moon.trace.parquet  |

    @R27.1
    Scenario: Requests of OpenAI's API are known by hashes of their texts
      Given a file "batch.jsonl" of two chats with one system prompt
      When I import "batch.jsonl"
      Then the trace has 2 requests whose first 2 hashes are equal, and no text
      And the message says "no arrival times: set workload.arrival and workload.rate"
      And the message says "no output lengths: they are drawn from workload.output_len"
      And the message says "no numbers of prompt tokens: they are estimated from the text, four bytes a token"

    @R27.1
    Scenario: Samples and several prompts are requests of their own, and tools a part of a prompt
      Given a file "calls.jsonl" of calls with samples, several prompts, token ids and tools
      When I import "calls.jsonl"
      Then the message says "requests of OpenAI's API, 7 requests, 19 prompt tokens, 26 output tokens"

    @R27.1
    Scenario: What a source cannot tell is said where it counts
      Given a file "own.csv" of a table of requests
      When I import "own.csv"
      And I replay the trace
      Then the command fails without a traceback
      And the message says "what would be found again is unknown"

  Rule: Times and names of columns are the user's

    @R27.2
    Scenario Outline: Times in <unit>
      Given a file "own.csv" with "t,in,out" and <rows>
      When I import "own.csv" with "columns.arrival=t columns.prompt_tokens=in columns.output_tokens=out <settings>"
      Then the trace's requests arrive at 0, 1.5, 2 s

      Examples:
        | unit                        | rows                                                                                          | settings  |
        | seconds                     | 5,7,1; 6.5,8,2; 7,9,3                                                                         |           |
        | milliseconds                | 1700000000000,7,1; 1700000001500,8,2; 1700000002000,9,3                                       | unit=ms   |
        | dates, in several zones     | 2026-11-16T10:00:00Z,7,1; 2026-11-16T11:00:01.5+01:00,8,2; 2026-11-16T10:00:02,9,3            |           |
        | dates, as web servers and mail have them | [16/Nov/2026:10:00:00 +0000],7,1; 2026-11-16T10:00:01.5Z,8,2; "Mon, 16 Nov 2026 10:00:02 GMT",9,3 |           |
        | any order, and sorted       | 7,9,3; 5,7,1; 6.5,8,2                                                                         | sort=true |

    @R27.2
    Scenario Outline: Of a table <what> need not be said
      Given a file "own.csv" with "<names>" and <rows>
      When I import "own.csv"
      Then the trace's requests arrive at 0, 1.5, 2 s
      And the message says "24 prompt tokens, 6 output tokens"

      Examples:
        | what                        | names                                    | rows                                                    |
        | how words are written       | Time,Prompt Tokens,Completion-Tokens     | 5,7,1; 6.5,8,2; 7,9,3                                   |
        | the unit that a name says   | output_tokens,timestamp_ms,prompt_tokens | 1,1700000000000,7; 2,1700000001500,8; 3,1700000002000,9 |
        | what divides cells          | time;input_tokens;output_tokens          | 5;7;1; 6.5;8;2; 7;9;3                                   |
        | capitals that begin words   | startTime,promptTokens,completionTokens  | 5,7,1; 6.5,8,2; 7,9,3                                   |
        | a time that is said to be UTC | timestamp,input_tokens,output_tokens   | 2026-11-16 10:00:00 UTC,7,1; 2026-11-16 10:00:01.5 UTC,8,2; 2026-11-16 10:00:02 UTC,9,3 |
        | what stands for nothing     | time,input_tokens,output_tokens,cached_tokens | 5,7,1,NULL; 6.5,8,2,\\N; 7,9,3,nan                 |
        | where a text of lines ends  | time,prompt,input_tokens,output_tokens   | 5,"a; b, ""c"" d; ",7,1; 6.5,5" x,8,2; 7,,9,3           |
        | which of two is the time    | date,time,input_tokens,output_tokens     | 2026-11-16,5,7,1; 2026-11-16,6.5,8,2; 2026-11-16,7,9,3  |

    @R27.2
    Scenario: Requests of a table are known by the blocks that it names
      Given a file "own.jsonl" with "" and {"time": 1, "prompt_tokens": 40, "output_tokens": 1, "block_ids": [5, 6]}; {"time": 2, "prompt_tokens": 48, "output_tokens": 1, "block_ids": [5, 6, 9]}
      When I import "own.jsonl"
      Then the trace has 2 requests whose first 2 hashes are equal, and no text

    @R27.2
    Scenario: What of a table is not used is said
      Given a file "own.csv" with "when,prompt_tokens,output_tokens" and 1,7,2; 2,8,3
      When I import "own.csv"
      Then the command succeeds
      And the message says "not read: when; columns.arrival=NAME and others say what a column has"

    @R27.2
    Scenario Outline: Requests that ask for nothing are left out of <what>, and counted
      Given a file "<file>" with "<names>" and <rows>
      When I import "<file>"
      Then the trace's requests arrive at 0, 1.5, 2 s
      And the message says "24 prompt tokens, 6 output tokens"
      And the message says "left out, since they ask for nothing: 2, the first <first>"

      Examples:
        | what             | file      | names                                   | rows | first |
        | a table          | own.csv   | time,prompt_tokens,output_tokens        | 4,0,3; 5,7,1; 6,9,0; 6.5,8,2; 7,9,3 | in line 2, with 0 prompt tokens |
        | a trace          | azure.csv | TIMESTAMP,ContextTokens,GeneratedTokens | 2023-11-16 18:15:05,7,1; 2023-11-16 18:15:06,0,0; 2023-11-16 18:15:06,9,0; 2023-11-16 18:15:06.5,8,2; 2023-11-16 18:15:07,9,3 | in line 3, with 0 prompt tokens |
        | what has no rows | b.json    |                                         | {"request_throughput": 1, "start_times": [5, 6, 6, 6.5, 7], "input_lens": [7, 9, 0, 8, 9], "output_lens": [1, 0, 1, 2, 3], "ttfts": [1, 1, 1, 1, 1], "itls": [[], [], [], [], []]} | request 2, with 0 output tokens |

    @R27.2
    Scenario: Fields of a log may be within others
      Given a file "log.jsonl" with "" and {"ts": "2026-11-20T09:00:00+02:00", "usage": {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2.0}}}; {"ts": "2026-11-20T07:00:01.5Z", "usage": {"prompt_tokens": 17, "completion_tokens": 5}}; {"ts": "2026-11-20T07:00:02Z", "usage": {"prompt_tokens": 9, "completion_tokens": 3}}
      When I import "log.jsonl"
      Then the trace's requests arrive at 0, 1.5, 2 s
      And the message says "33 prompt tokens, 9 output tokens"
      And the message says "run it"
      And nothing is said of "not read"

    @R27.2
    Scenario Outline: A table may be <what>
      Given a log of three requests as "<file>"
      When I import "<file>"
      Then the trace's requests arrive at 0, 1.5, 2 s
      And the message says "24 prompt tokens, 6 output tokens"
      And the message says "run it"

      Examples:
        | what                          | file         |
        | Parquet with times            | zone.parquet |
        | Parquet with times of no zone | naive.parquet |
        | Parquet with fields in fields | deep.parquet |
        | a JSON list                   | list.json    |
        | a JSON list in many lines     | pretty.json  |

    @R27.2
    Scenario: Thousands may be apart
      Given a file "own.csv" with "prompt_tokens,output_tokens" and "1,833",7; "2,001,833","1,000"
      When I import "own.csv"
      Then the command succeeds
      And the message says "2 requests, 2,003,666 prompt tokens, 1,007 output tokens"

    @R27.14
    Scenario: Requests whose answers are not known are left out
      Given a file "own.csv" with "time,prompt_tokens,output_tokens" and 1,7,5; 2,8,; 3,9,4; ,9,4
      When I import "own.csv" with "drop=[outputs,times]"
      Then the command succeeds
      And the message says "2 requests, 16 prompt tokens, 9 output tokens, in 2 s"
      And the message says "left out by drop=outputs,times: 2 of 4 requests, so that this load is lighter than it was"

    @R27.14
    Scenario: Requests that have no number of prompt tokens, as those that failed, are left out
      Given a file "own.csv" with "time,prompt_tokens,output_tokens" and 1,,; 2,7,5; 3,,4; 4,8,
      When I import "own.csv" with "drop=[prompts,outputs]"
      Then the command succeeds
      And the message says "1 requests, 7 prompt tokens, 5 output tokens"
      And the message says "left out by drop=prompts,outputs: 3 of 4 requests, so that this load is lighter than it was"

    @R27.2
    Scenario Outline: <what> is refused
      Given a file "own.csv" with "<names>" and <rows>
      When I import "own.csv" with "<settings>"
      Then the command fails without a traceback
      And the message says "<message>"
      And no trace is left

      Examples:
        | what                       | names              | rows             | settings | message |
        | A file of no known format  | a,b                | 1,2              | sort=false | format=auto: that of ...own.csv is not recognised; known: aiperf, azure |
        | A file of unknown columns  | a,b                | 1,2              | sort=false | (kvlab import --help); it begins with a,b |
        | The first time alone       | time,prompt_tokens | ,7; 1,8          | sort=false | 1 of 2 requests have an arrival time, the first without is in line 2; expected all or none |
        | A column that is not there | a,b                | 1,2              | columns.prompt_tokens=in | columns.prompt_tokens=in: the file has no such column; it has a, b |
        | Columns without a row      |                    | time,prompt_tokens | columns.arrival=time | own.csv: holds no request |
        | A time in another unit     | time,prompt_tokens | 1700000000000,7  | sort=false | 1700000000000 is no time in seconds; set unit=ms if it is |
        | No time at all             | time,prompt_tokens | noon,7           | sort=false | expected a number, or a date and time such as |
        | Times that go backwards    | time,prompt_tokens | 2,7; 1,7         | sort=false | request 2 arrives 1 s before the one before it; sort=true sorts them |
        | A row that is cut off      | time,prompt_tokens | 1,7; 2           | sort=false | line 3: 1 columns; expected 2 as in the first line |
        | A length that is none      | time,prompt_tokens | 1,-7             | sort=false | own.csv, line 2, column prompt_tokens: '-7'; expected a whole number of tokens, from 0 |
        | A prompt without a length  | time,prompt_tokens | 1,7; 2,          | sort=false | line 3, column prompt_tokens: is empty; expected a number of tokens; drop=prompts leaves out the requests without |
        | A length that may be two   | time,prompt_tokens | 1,"1,83"         | sort=false | line 2, column prompt_tokens: '1,83'; expected a whole number of tokens, from 0 |
        | A column that is there twice | time,prompt_tokens,prompt_tokens | 1,2,3 | sort=false | column prompt_tokens: is there twice; rename one of them |
        | A time that never comes    | time,prompt_tokens | 1,7; inf,7       | sort=false | line 3, column time: 'inf'; expected a number, or a date and time such as |
        | A table without names      | 1,7                | 2,7              | columns.prompt_tokens=7 | own.csv, line 1: numbers alone; expected the names of the columns in the first line, as arrival, |
        | A cell without an end      | time,prompt_tokens | 1,"7; 2,8        | sort=false | line 2: a cell in quotes does not end; expected a line of a CSV file |
        | Nothing but empty requests | time,prompt_tokens | 1,0              | sort=false | holds no request; left out, since they ask for nothing: 1, the first in line 2, with 0 prompt tokens |
        | Some times and not others  | time,prompt_tokens | 1,7; ,8          | sort=false | 1 of 2 requests have an arrival time, the first without is in line 3; expected all or none; drop=times leaves those without out |
        | A setting that drops nothing | time,prompt_tokens | 1,7            | drop=[words] | drop=words: unknown; known: times, outputs, prompts, broken |
        | A format with another name | time,prompt_tokens | 1,7              | format=xml | format=xml: unknown; known: aiperf |
        | Prompts of no table        | time,prompt_tokens | 1,7              | format=aiperf drop=[prompts] | drop=prompts: is for tables |
        | A setting with a slip      | time,prompt_tokens | 1,7              | columns.arival=time | columns.arival=time: unknown; did you mean columns.arrival? |
        | An unknown unit            | time,prompt_tokens | 1,7              | unit=h   | unit=h: unknown; known: s, ms, us, ns |

    @R27.2
    Scenario Outline: Of others, <what> is refused
      Given a file "<file>" with "" and <text>
      When I import "<file>"
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | what                          | file    | text | message |
        | a report without its requests | g.json  | {"guidellm_version": 1} | g.json: has no 'benchmarks'; expected a report of GuideLLM |
        | a report that is cut off      | g.json  | {"guidellm_version": 1, | g.json: cannot be read: |
        | a request without its facts   | p.json  | [{"start_time": 1, "end_time": 2, "info": {}}] | p.json: has no 'input_tokens'; expected inference-perf's |
        | an item that is no request    | own.json | [{"time": 1, "prompt_tokens": 7}, 8] | own.json, item 2: not a JSON object; expected a JSON object with a request |
        | a span without its time       | o.json  | {"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]} | line 1: has no 'startTimeUnixNano'; expected spans in OTLP's JSON |
        | a second object of several lines | i.json | {; "resourceSpans": []}; {; "resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]} | i.json, item 2: has no 'startTimeUnixNano' |
        | several lines that are cut off | i.json | {; "resourceSpans": [ | i.json: cannot be read: |
        | a line of another format      | d.jsonl | {"schema": "dynamo.request.trace.v1"}; oops | d.jsonl, line 2: |
        | a number that is text         | p.json  | [{"start_time": 1, "end_time": 2, "info": {"input_tokens": "7", "output_tokens": 1}}] | p.json: a prompt of '7' tokens; expected inference-perf's |
        | a block that no tokens have   | d.jsonl | {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": {"request_received_ms": 1, "replay": {"trace_block_size": 16, "input_length": 7, "input_sequence_hashes": [1, 2]}}} | d.jsonl, line 1: expected 1 hashes of 64 bits, one for each 16 tokens |
        | blocks without tokens         | d.jsonl | {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": {"request_received_ms": 1, "replay": {"trace_block_size": 0, "input_length": 7, "input_sequence_hashes": []}}} | d.jsonl, line 1: |
        | a chat without samples        | b.jsonl | {"messages": [{"role": "user", "content": "a"}], "n": 0} | b.jsonl, line 1: n is 0; expected 1 to |
        | a line that is no JSON        | own.jsonl | {"time": 1, "prompt_tokens": 7}; oops | own.jsonl, line 2: Expecting value (character 1); expected a JSON object with a request |
        | a first line with less than others | own.jsonl | {"time": 1, "prompt_tokens": 7}; {"time": 2, "prompt_tokens": 7, "completion_tokens": 3} | 1 of 2 requests have an output length, the first without is in line 1 |
        | a chat's time in milliseconds | own.jsonl | {"timestamp": 1763300000000, "messages": [{"role": "user", "content": "a"}]} | line 1, column timestamp: 1763300000000 is no time in seconds; set unit=ms if it is |
        | a file that is packed otherwise | own.csv.bz2 | BZh9 | own.csv.bz2: is packed by bzip2; unpack it, or save it as CSV |
        | a log without prompts         | v.log   | INFO 11-16 18:15:00 [a.py:1] Received request a-0: params: x | has no tokens of prompts; log them with VLLM_LOGGING_LEVEL=DEBUG |

    @R27.15
    Scenario Outline: Of traffic that asked for <asked> tokens and got 8, a server that keeps memory for <kept> runs <running> at once
      Given a file "own.csv" with "time,prompt_tokens,output_tokens<column>" and 5,8,8<asked>; 5,8,8<asked>; 5,8,8<asked>; 5,8,8<asked>
      When I import "own.csv"
      And I run the trace "own.trace.jsonl" with "workload=recorded kv.num_blocks=4 kv.block_size=16 scheduler.admission_reserve=0 <settings>" on a tiny model
      Then the command succeeds
      And at most <running> ran at once, and each got 8 tokens
      And the message says "<message>"

      Examples:
        | column      | asked | kept                    | settings                                                                      | running | message |
        | ,max_tokens | ,40   | what was asked for      | scheduler.reserve_output=true                                                  | 1       | results |
        | ,max_tokens | ,40   | what was asked for      | scheduler.reserve_output=true executor=simulated hardware=l4 framework=trtllm  | 1       | results |
        | ,max_tokens | ,40   | prompts alone           | scheduler.reserve_output=false                                                 | 4       | results |
        |             |       | outputs as they were    | scheduler.reserve_output=true                                                  | 4       | what their clients asked for is not known; workload.max_tokens=N says it |
        | ,max_tokens | ,-1   | outputs as they were    | scheduler.reserve_output=true                                                  | 4       | what their clients asked for is not known; workload.max_tokens=N says it |
        |             |       | what all are said to ask for | scheduler.reserve_output=true workload.max_tokens=40                      | 1       | results |

    @R27.1
    Scenario: A run of kvlab is traffic, too
      When I run "workload=burst48" on a tiny model
      And I import the run's directory
      Then the command succeeds
      And the message says "a run of kvlab, 4 requests"

    @R27.1
    Scenario: Samples of a run are requests that have their prompt in common
      When I run "workload=burst48 workload.samples=3" on a tiny model
      And I import the run's directory
      Then the command succeeds
      And the message says "a run of kvlab, 12 requests"
      And the trace has 4 prompts, of 3 requests each

    @R27.2
    Scenario: A trace need not be imported
      Given a file "moon.jsonl" of Mooncake's trace
      When I import "moon.jsonl" with "to=moon.trace.jsonl"
      And I import "moon.trace.jsonl"
      Then the command fails without a traceback
      And the message says "is a trace of kvlab already: set workload=recorded and workload.path to it"

    @R27.2
    Scenario: A trace takes the place of an earlier one, and of no other file
      Given a file "moon.jsonl" of Mooncake's trace
      And a file "notes.txt" with "Of Monday" and the log
      When I import "moon.jsonl" with "to=moon.trace.jsonl"
      And I import "moon.jsonl" with "to=moon.trace.jsonl"
      Then the command succeeds
      When I import "moon.jsonl" with "to=notes.txt"
      Then the command fails without a traceback
      And the message says "to=notes.txt: is there, and no trace; name another file, or move that one away"
      Given a file "moon.trace.jsonl" with "{"kvlab_trace": 1, "source": "record"}" and {"prompt_tokens": 5}
      When I import "moon.jsonl"
      Then the command fails without a traceback
      And the message says "to=moon.trace.jsonl: is there, and what kvlab record recorded; name another file, or move that one away"

    @R27.2
    Scenario: A trace without a name of its own takes the place of none that another file made
      Given a file "monday/log.csv" with "time,prompt_tokens,output_tokens" and 5,7,1
      And a file "tuesday/log.csv" with "time,prompt_tokens,output_tokens" and 5,8,2
      When I import "monday/log.csv"
      And I import "monday/log.csv"
      Then the command succeeds
      When I import "tuesday/log.csv"
      Then the command fails without a traceback
      And the message says "to=log.trace.jsonl: is there, and made of another file; to=NAME names another trace, or this one to replace it"
      When I import "tuesday/log.csv" with "to=log.trace.jsonl"
      Then the command succeeds

    @R27.2
    Scenario: A trace becomes Parquet, and JSON lines again
      Given a file "moon.jsonl" of Mooncake's trace
      When I import "moon.jsonl" with "to=one.trace.jsonl"
      And I import "one.trace.jsonl" with "to=one.parquet"
      And I import "one.parquet" with "to=again.trace.jsonl"
      Then "again.trace.jsonl" is "one.trace.jsonl", byte for byte
      When the last 5 bytes of "one.parquet" are lost
      And I import "one.parquet" with "to=third.trace.jsonl"
      Then the command fails without a traceback
      And the message says "one.parquet: cannot be read as Parquet: "

  Rule: Other tools can have the trace

    @R27.8
    Scenario Outline: A trace exported as <format> has the same requests
      Given a file "moon.jsonl" of Mooncake's trace
      When I import "moon.jsonl" with "to=moon.trace.jsonl"
      And I export "moon.trace.jsonl" with "format=<format> to=<file>"
      And I import "<file>" with "to=again.trace.jsonl"
      Then "again.trace.jsonl" and "moon.trace.jsonl" have the same times and lengths
      And as many tokens of prompts are found again <found>

      Examples:
        | format      | file        | found            |
        | mooncake    | other.jsonl | in both          |
        | timed_trace | other.jsonl | in both          |
        | azure       | other.csv   | in the first alone |
        | burstgpt    | other.csv   | in the first alone |

    @R27.8
    Scenario Outline: What cannot be exported: <what>
      Given a file "batch.jsonl" of two chats with one system prompt
      When I import "batch.jsonl" with "to=batch.trace.jsonl"
      And I export "<file>" with "<settings>"
      Then the command fails without a traceback
      And the message says "<message>"

      Examples:
        | what                | file              | settings              | message |
        | a trace without times | batch.trace.jsonl | format=azure to=x.csv | batch.trace.jsonl: has no arrival times and no output lengths, which format=azure needs |
        | an unknown format   | batch.trace.jsonl | format=xml to=x.csv   | format=xml: unknown; known: azure, burstgpt, mooncake, timed_trace |
        | no format           | batch.trace.jsonl | to=x.csv              | which one? A trace is exported as one of azure, burstgpt |
        | nowhere to go       | batch.trace.jsonl | format=azure          | name the file: to=FILE |
        | onto itself         | batch.trace.jsonl | format=azure to=batch.trace.jsonl | is the trace that is exported; name another |
        | onto a file that is there | batch.trace.jsonl | format=azure to=batch.jsonl | to=batch.jsonl: is there; name another file, or move that one away |
        | what is no trace    | batch.jsonl       | format=azure to=x.csv | is no trace of kvlab; kvlab import FILE makes one |

  Rule: A trace keeps no text, and is worth what is left of it

    @R27.3
    Scenario: Traces of one file with different secrets have no hash in common
      Given a file "batch.jsonl" of two chats with one system prompt
      When I import "batch.jsonl" twice, into "a.jsonl" and "b.jsonl"
      Then they have no hash in common, and different key ids

    @R27.3
    Scenario: With the same key they are the same
      Given a file "batch.jsonl" of two chats with one system prompt
      And a file "key" with "" and 0123456789abcdef0123456789abcdef
      When I import "batch.jsonl" twice with "hash_with=key", into "a.jsonl" and "b.jsonl"
      Then they have the same hashes

    @R27.3
    Scenario: A trace that ends in the midst of a line is read up to it
      Given a file "moon.jsonl" of Mooncake's trace
      When I import "moon.jsonl" with "to=moon.trace.jsonl"
      And the last 9 bytes of "moon.trace.jsonl" are lost
      And I run the trace "moon.trace.jsonl" with "workload=recorded model.max_seq_len=512" on a tiny model
      Then the command succeeds
      And it served 2 requests
