from accelerate.launchers.tpu import install_xla as install_xla
