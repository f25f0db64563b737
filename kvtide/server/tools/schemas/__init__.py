"""What a tool's schema says of its arguments, for formats that write them one by one.

`alternatives`    a schema without references and combinations: lists of schemas that hold at once
`argument_forms`  which arguments a call has: those that are required, and the schemas of each
`value_types`     which JSON types a value may have, and which of them the schema constrains
`text_values`     the texts that a schema admits, as they stand between markers
`search_pattern`  a `pattern`, which is searched for, as an expression of the whole text
`text_formats`    the regular expressions of `format`
`tool_schema`     all of this for one tool: its grammar and its parser ask the same
"""
