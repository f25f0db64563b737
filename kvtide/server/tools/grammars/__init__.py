"""Grammars of answers with tools.

`lark_rules`      the rules of one grammar: markers, free text, JSON
`argument_rules`  arguments that a format writes one by one
`enforcement`     which schemas can be enforced, and the refusal of those that cannot
"""
