"""What this node has done and what others did for it: activity, figures, signed receipts and statements.

May import all protocols below; nothing that they decide rests on it.
"""
