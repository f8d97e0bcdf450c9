Feature: An answer ends when its request says so, and gives its memory back
  A model that says "one| two| three" has a token for each piece between the bars. Where it may not say what it
  wants to, it says "~". "</s>" is its end-of-sequence token.

  Rule: The end-of-sequence token, a stop token, a stop string or the length ends an answer, whichever comes first

    @R10.4
    Scenario Outline: <what>
      Given a model that says "one| two|</s>| four| five| six"
      When a request asks for up to <most> tokens <how>
      Then the answer has <tokens> tokens and ended by "<reason>"
      And its text is <text>
      And the text came piece by piece, none of it taken back

      Examples:
        | what                           | most | how                                           | tokens | reason | text                      |
        | the end-of-sequence token      | 6    |                                               | 3      | stop   | "one two"                 |
        | the length, before it          | 2    |                                               | 2      | length | "one two"                 |
        | the length, at it              | 3    |                                               | 3      | stop   | "one two"                 |
        | it is ignored                  | 6    | ignoring the end of sequence                  | 6      | length | "one two</s> four five six" |
        | a stop token                   | 6    | with the stop token " two"                    | 2      | stop   | "one"                     |
        | a stop token behind it         | 6    | with the stop token " four"                   | 3      | stop   | "one two"                 |
        | a stop token, while ignoring   | 6    | ignoring the end of sequence, with the stop token " five" | 5 | stop | "one two</s> four"  |
        | a stop string                  | 6    | with the stop string " two"                   | 2      | stop   | "one"                     |
        | a stop string that never comes | 6    | with the stop string "seven"                  | 3      | stop   | "one two"                 |

    @R10.4
    Scenario Outline: The stop string <stop> across token boundaries
      Given a model that says "Hel|lo| wor|ld|, hel|l is| hot"
      When a request asks for up to 7 tokens with the stop string <stop>
      Then the answer has <tokens> tokens and ended by "<reason>"
      And its text is <text>
      And the text came piece by piece, none of it taken back

      Examples:
        | stop       | tokens | reason | text                        |
        | "Hello"    | 2      | stop   | ""                          |
        | "lo wor"   | 3      | stop   | "Hel"                       |
        | "o world," | 5      | stop   | "Hell"                      |
        | "l"        | 1      | stop   | "He"                        |
        | "hell"     | 6      | stop   | "Hello world, "             |
        | "hot"      | 7      | stop   | "Hello world, hell is "     |
        | "hot dog"  | 7      | length | "Hello world, hell is hot"  |
        | "world is" | 7      | length | "Hello world, hell is hot"  |

    @R10.4
    Scenario: The first of several stop strings ends the answer
      Given a model that says "a|b|c|d|e"
      When a request asks for up to 5 tokens with the stop strings "de", "cd" and "bx"
      Then the answer has 4 tokens and ended by "stop"
      And its text is "ab"

    @R10.4
    Scenario: What may become a stop string is held back, and output once it cannot
      Given a model that says "a|<|b|<|end|>|c"
      When a request asks for up to 7 tokens with the stop string "<end>"
      Then its outputs carry the texts "a", "", "<b", "", "", ""
      And the answer has 6 tokens and ended by "stop"

  Rule: Below the minimum length nothing ends an answer

    @R10.4
    Scenario Outline: At least <least> tokens of "one| two|</s>| four| five", <how>
      Given a model that says "one| two|</s>| four| five"
      When a request asks for <least> to 5 tokens <how>
      Then the answer has <tokens> tokens and ended by "<reason>"
      And its text is <text>

      Examples:
        | least | how                          | tokens | reason | text                     |
        | 0     | and nothing else             | 3      | stop   | "one two"                |
        | 2     | and nothing else             | 3      | stop   | "one two"                |
        | 3     | and nothing else             | 5      | length | "one two~ four five"     |
        | 5     | and nothing else             | 5      | length | "one two~ four five"     |
        | 1     | with the stop token "one"    | 3      | stop   | "~ two"                  |
        | 2     | with the stop string "one"   | 3      | stop   | "one two"                |
        | 2     | with the stop string "e two" | 2      | stop   | "on"                     |
        | 3     | with the stop string "e two" | 5      | length | "one two~ four five"     |

  Rule: An aborted request gives every block back, wherever it is

    # "leaves" is behind "stays" in the waiting queue. What it held is free when the next step begins.

    @R9.10
    Scenario Outline: Aborted <state>, in <memory>
      Given the model "qwen3"
      And batches of up to <batch> sequences
      And steps of up to 16 tokens
      And no admission reserve
      And a server with <memory>
      And a request "stays" of 20 prompt tokens and 30 output tokens
      And a request "leaves" of 40 prompt tokens and 40 output tokens
      When the server steps with "leaves" <state>
      And "leaves" is aborted
      And the server steps once
      Then only "stays" holds blocks
      And "leaves" got one output that says it was aborted
      When the server steps until it has no work
      Then "stays" got what transformers generates, token for token
      And every block is free

      Examples:
        | state      | batch | memory                                       |
        | waiting    | 1     | 12 blocks of 8 tokens                        |
        | waiting    | 1     | 2 contiguous slots of 96 tokens              |
        | in prefill | 2     | 12 blocks of 8 tokens                        |
        | in prefill | 2     | 12 blocks of 8 tokens that shares prefixes   |
        | in prefill | 2     | 2 contiguous slots of 96 tokens              |
        | in decode  | 2     | 14 blocks of 8 tokens                        |
        | in decode  | 2     | 14 blocks of 8 tokens that shares prefixes   |
        | in decode  | 2     | 2 contiguous slots of 96 tokens              |
        | preempted  | 2     | 10 blocks of 8 tokens                        |
        | preempted  | 2     | 10 blocks of 8 tokens that shares prefixes   |

    @R9.10
    Scenario Outline: Every sample of a request aborted <state>
      Given the model "qwen3"
      And steps of up to 16 tokens
      And a server with 32 blocks of 8 tokens
      And a request "leaves" of 40 prompt tokens and 20 output tokens in 3 samples
      When the server steps with "leaves" <state>
      And "leaves" is aborted
      And the server steps once
      Then every block is free
      And "leaves" got one output that says it was aborted

      Examples:
        | state      |
        | in prefill |
        | in decode  |
