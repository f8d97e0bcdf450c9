Feature: Some content is kept longer than other
  Requests pin what they begin with, content that nobody uses expires, and a tenant has a share of the pool beyond
  which its own blocks go first. All of it holds under every eviction policy, and nothing of it without its setting.

  Rule: A pinned prefix goes last

    @R7.7
    Scenario Outline: A system prompt of 32 tokens outlives a flood under <policy>, if it is pinned
      Given a pool of 8 blocks of 16 tokens with kv.eviction=<policy>, kv.pinned_share=<share>
      And a text "system" of 48 tokens was stored and freed that pins its first 32
      When a text "one" of 96 tokens is stored and freed
      And a text "two" of 96 tokens is stored and freed
      Then the first <left> blocks of "system" are cached, and no more
      And <pinned> blocks are pinned, and <refused> pins were refused

      Examples:
        | policy  | share | left | pinned | refused |
        | lru     | 0.25  | 2    | 2      | 0       |
        | lru     | 0.2   | 0    | 0      | 1       |
        | lru     | 0     | 0    | 0      | 1       |
        | fifo    | 0.25  | 2    | 2      | 0       |
        | lfu     | 0.25  | 2    | 2      | 0       |
        | s3_fifo | 0.25  | 2    | 2      | 0       |
        | sieve   | 0.25  | 2    | 2      | 0       |
        | cost    | 0.25  | 2    | 2      | 0       |

    @R7.7
    Scenario: What runs comes before what is pinned
      Given a pool of 8 blocks of 16 tokens with kv.pinned_share=0.5
      And a text "system" of 64 tokens was stored and freed that pins its first 64
      When a text "long" of 112 tokens arrives
      Then the first 1 blocks of "system" are cached, and no more
      And every token of "long" reads back as it was written

    @R7.7
    Scenario: A pin ends that no request has used for its time
      Given a pool of 8 blocks of 16 tokens with kv.pinned_share=0.5, kv.pin_ttl_s=60
      And a text "system" of 32 tokens was stored and freed that pins its first 32
      When 59 seconds have passed
      Then 2 blocks are pinned, and 0 pins were refused
      When 60 seconds have passed
      Then 0 blocks are pinned, and 0 pins were refused
      And the first 2 blocks of "system" are cached, and no more

  Rule: Content that nobody uses expires

    @R7.8
    Scenario Outline: A text is asked for again after <seconds> seconds, with kv.ttl_s=30
      Given a pool of 8 blocks of 16 tokens with kv.ttl_s=30
      And a text "alice" of 48 tokens was stored and freed
      When <seconds> seconds have passed
      Then the first <left> blocks of "alice" are cached, and no more
      And <gone> blocks have expired
      And 0 blocks were evicted

      Examples:
        | seconds | left | gone |
        | 29      | 3    | 0    |
        | 30      | 0    | 3    |

  Rule: A tenant beyond its quota gives its own blocks first

    @R7.9
    Scenario Outline: "busy" floods the pool while "calm" waits, with <settings>
      Given a pool of 12 blocks of 16 tokens with <settings>
      And the salt "calm" stored and freed a text "alice" of 48 tokens
      And the salt "busy" stored and freed a text "one" of 128 tokens
      When the salt "busy" stores and frees a text "two" of 128 tokens
      And the salt "busy" stores and frees a text "three" of 128 tokens
      Then the salt "calm" finds <left> blocks of "alice"
      And <count> blocks were evicted for a quota

      Examples:
        | settings                       | left | count |
        | kv.eviction=lru                | 0    | 0     |
        | kv.eviction=lru, kv.quota=0.5  | 3    | 15    |
        | kv.eviction=lfu, kv.quota=0.5  | 3    | 15    |
        | kv.eviction=cost, kv.quota=0.5 | 3    | 15    |

  Rule: What cannot be kept is refused with a sentence

    @R7.7 @R7.8 @R7.9
    Scenario Outline: <settings> is refused
      Given a server configured with <settings>
      When the server starts
      Then it refuses, saying "<reason>"

      Examples:
        | settings                                   | reason                                                                                              |
        | kv.pinned_share=2                          | kv.pinned_share=2.0: must be a number, at most 1                                                    |
        | kv.quota=0                                 | kv.quota=0.0: must be a number, more than 0 and at most 1, or null                                  |
        | kv.ttl_s=-1                                | kv.ttl_s=-1.0: must be a number, more than 0                                                        |
        | kv.ttl_s=9, kv.backend=contiguous          | kv.ttl_s=9.0: is for cached blocks, and kv.backend=contiguous keeps none; use kv=paged              |
        | kv.quota=0.5, kv.prefix_sharing=false      | kv.quota=0.5: is for cached blocks, and kv.prefix_sharing=false keeps none; set it to true          |
