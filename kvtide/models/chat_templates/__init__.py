"""Chat templates for checkpoints that are published without one.

`builtin`  which `model_type` has one

DeepSeek V3.2 and V4 bring Python programs that write their prompts; the templates write the same
text. `thinking` or `enable_thinking` says whether the model thinks aloud, else `reasoning_effort`
does (all but `none`). If nothing does, V3.2 does not think and V4 does. Roles for search and
classification, which these programs have too, and V4's instructions for an effort are not written.
"""
