Feature: The live page
  A browser opens the page of a server. Its model is a tiny one whose words are single characters, with 24 blocks of 4 tokens, and its steps
  take half a second while they are watched.

  Background:
    Given the live page of a server

  @R18.10
  Scenario: A request is watched from its prompt to its end
    When I send "watched" for 40 tokens
    Then the page lists one request, in decode
    And its blocks are on the map, and pointing at the first says whose it is
    And at the end the line below the prompt says "40 tokens, the first after" and "ended by max tokens"
    And it lists no request, and no block is in use

  @R18.10
  Scenario: The next turn of a conversation finds the prompt of the one before in the prefix cache
    Given I sent "first" for 40 tokens
    When I send "more" for 2 tokens
    Then the line below the prompt says "12 of 75 prompt tokens from the prefix cache"

  @R18.10
  Scenario Outline: <what> ends an answer, and its blocks come back
    Given I sent "abc" for 80 tokens, and its answer has begun
    When I press <what>
    Then the line below the prompt says "stopped"
    And the pool is empty

    Examples:
      | what     |
      | "Stop"   |
      | "Escape" |

  @R18.10
  Scenario: A mistake is told, and the prompt stays
    When I send a prompt of 200 characters
    Then the page says "leaves no room"
    And the prompt is still there

  @R18.10
  Scenario: A model without words is asked in token ids
    Given the live page of a server whose model has no tokenizer
    When I send "five six" for 8 tokens
    Then the line below the prompt says "Token ids are whole numbers with spaces between them, as 5 6 7 8."
    When I send "5 6 7 8" for 8 tokens
    Then the line below the prompt says "8 tokens"
    And the answer is token ids

  @R18.10
  Scenario: A key is asked for, kept in the tab, and forgotten when I say so
    Given the live page of a server with the key "secret"
    When I give the key "wrong"
    Then the page says that the server refused it
    When I give the key "secret"
    Then the page says "ready", and again after it was loaded anew
    And the API key can be forgotten

  @R18.10
  Scenario: A server that does not answer is told, until it does
    Given the server does not answer
    Then the page's status is "no connection, trying again"
    When the server answers again
    Then the page's status is "ready"
