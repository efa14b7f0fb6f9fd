//! Compiles the kubelet protocols with a pure-Rust protoc, so that a build needs no tool but cargo.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=kubelet");
    if std::env::var_os("CARGO_FEATURE_KUBELET").is_none() {
        return Ok(());
    }
    let descriptors = protox::compile(["deviceplugin.proto", "podresources.proto"], ["kubelet"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
