"""Structured output: a grammar per request, enforced by masks over the vocabulary.

`grammar`           what a request asks for: a JSON schema, an expression, texts, a Lark grammar
`grammar_rules`     the rules of Lark that these are compiled from
`grammar_compiler`  compiles grammars for the engine's tokenizer, off the engine's thread
`token_matcher`     how far one request has come in its grammar
`token_mask`        a bit per token, and logits without the tokens that it rules out
`step_masks`        the tokens that each row of a step may sample, computed while the device works
"""
