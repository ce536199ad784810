"""What a remote engine and the server it talks to say to each other: JSON, and arrays as safetensors.

Nothing that travels is executed. A message is a line of JSON, and the arrays that belong to it (`frames`). Results,
plans and errors each have a form of their own; `plain` is for clients that read JSON only.
"""
