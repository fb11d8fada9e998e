"""Publishing to many servers: real processes, real connections, and a simulated 10,000."""
