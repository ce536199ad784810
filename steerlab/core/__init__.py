"""What every layer shares: errors, hook points, text, sampling policy, and the engine protocol."""
