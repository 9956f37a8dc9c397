from accelerate.collectives.rng import set_seed as set_seed
from accelerate.collectives.rng import synchronize_rng_state as synchronize_rng_state
from accelerate.collectives.rng import synchronize_rng_states as synchronize_rng_states
