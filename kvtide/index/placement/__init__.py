"""At which page boundaries a request leaves checkpoints of its windows and states.

`placement`          the interface, fixed rules, and the plan of a reservation's segments
`learned_placement`  the default: weighs what a checkpoint costs against what it may save
"""
