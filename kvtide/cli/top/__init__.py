"""`kvtide top`: how a snapshot of a server looks in a terminal."""
