//! Calls of a session: which ones are allowed, and the VM that they address. Pure.

use coracle_api::subresources::Subresource;
use coracle_proto::host as pb;
use prost::Message;

/// Path prefix of calls.
const SERVICE: &str = "/coracle.host.v1.Host/";

/// A refused call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("this subresource has no such call")]
    Call,
    #[error("the first message must be start")]
    NoStart,
    #[error("cannot read the first message")]
    Unreadable,
}

/// Returns the call of a path, when the subresource allows it.
pub(crate) fn allowed_call(path: &str, subresource: Subresource) -> Result<&'static str, Refused> {
    let name = path.strip_prefix(SERVICE).ok_or(Refused::Call)?;
    subresource.calls().iter().find(|call| **call == name).copied().ok_or(Refused::Call)
}

/// Returns the first message of a call with this VM, even when the message named another one.
pub(crate) fn bind_vm(call: &str, message: &[u8], vm: &str) -> Result<Vec<u8>, Refused> {
    match call {
        "Exec" => set_vm_name(
            message,
            |m: &mut pb::ExecRequest| match &mut m.message {
                Some(pb::exec_request::Message::Start(start)) => Some(&mut start.vm),
                _ => None,
            },
            vm,
        ),
        "Console" => set_vm_name(
            message,
            |m: &mut pb::ConsoleRequest| match &mut m.message {
                Some(pb::console_request::Message::Start(start)) => Some(&mut start.vm),
                _ => None,
            },
            vm,
        ),
        "PortForward" => set_vm_name(
            message,
            |m: &mut pb::PortForwardRequest| match &mut m.message {
                Some(pb::port_forward_request::Message::Start(start)) => Some(&mut start.vm),
                _ => None,
            },
            vm,
        ),
        "CopyIn" => set_vm_name(
            message,
            |m: &mut pb::CopyInRequest| match &mut m.message {
                Some(pb::copy_in_request::Message::Start(start)) => Some(&mut start.vm),
                _ => None,
            },
            vm,
        ),
        "CopyOut" => set_vm_name(message, |m: &mut pb::CopyOutRequest| Some(&mut m.vm), vm),
        "Logs" => set_vm_name(message, |m: &mut pb::LogsRequest| Some(&mut m.vm), vm),
        "WaitVm" => set_vm_name(message, |m: &mut pb::WaitVmRequest| Some(&mut m.vm), vm),
        "GetVm" => {
            let request = pb::GetVmRequest { vm: vm.to_owned(), exact: true, ..Default::default() };
            Ok(request.encode_to_vec())
        }
        _ => Err(Refused::Call),
    }
}

fn set_vm_name<M: Message + Default>(
    message: &[u8],
    name: impl FnOnce(&mut M) -> Option<&mut String>,
    vm: &str,
) -> Result<Vec<u8>, Refused> {
    let mut message = M::decode(message).map_err(|_| Refused::Unreadable)?;
    vm.clone_into(name(&mut message).ok_or(Refused::NoStart)?);
    Ok(message.encode_to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_outside_the_subresource_are_refused() {
        for (path, subresource, want) in [
            ("/coracle.host.v1.Host/Exec", Subresource::Exec, Ok("Exec")),
            ("/coracle.host.v1.Host/Exec", Subresource::Log, Err(Refused::Call)),
            ("/coracle.host.v1.Host/DeleteVm", Subresource::Exec, Err(Refused::Call)),
            ("/coracle.host.v1.Host/exec", Subresource::Exec, Err(Refused::Call)),
            ("/other.Host/Exec", Subresource::Exec, Err(Refused::Call)),
            ("Exec", Subresource::Exec, Err(Refused::Call)),
        ] {
            assert_eq!(allowed_call(path, subresource), want, "{path} of {subresource:?}");
        }
    }

    #[test]
    fn call_is_rewritten_to_the_vm_of_the_object() {
        let other = "other".to_owned();
        let start = pb::ExecStart { vm: other.clone(), argv: vec!["id".into()], ..Default::default() };
        let exec = pb::ExecRequest { message: Some(pb::exec_request::Message::Start(start)) };
        let named = bind_vm("Exec", &exec.encode_to_vec(), "web").unwrap();
        let named = pb::ExecRequest::decode(named.as_slice()).unwrap();
        let Some(pb::exec_request::Message::Start(start)) = named.message else {
            unreachable!("it was a start")
        };
        assert_eq!((start.vm.as_str(), start.argv.as_slice()), ("web", ["id".to_owned()].as_slice()));
        let get = pb::GetVmRequest { vm: other.clone(), ..Default::default() };
        let get = pb::GetVmRequest::decode(bind_vm("GetVm", &get.encode_to_vec(), "web").unwrap().as_slice())
            .unwrap();
        assert_eq!((get.vm.as_str(), get.exact), ("web", true));
        let logs = pb::LogsRequest { vm: other, follow: true, ..Default::default() };
        let logs = pb::LogsRequest::decode(bind_vm("Logs", &logs.encode_to_vec(), "web").unwrap().as_slice())
            .unwrap();
        assert_eq!((logs.vm.as_str(), logs.follow), ("web", true));
    }

    #[test]
    fn subresource_calls_can_all_name_a_vm() {
        for call in Subresource::ALL.into_iter().flat_map(|s| s.calls()) {
            assert_ne!(bind_vm(call, &[], "web"), Err(Refused::Call), "{call}");
        }
    }

    #[test]
    fn message_that_names_no_vm_is_refused() {
        let data = pb::ExecRequest { message: Some(pb::exec_request::Message::Stdin(vec![1])) };
        assert_eq!(bind_vm("Exec", &data.encode_to_vec(), "web"), Err(Refused::NoStart));
        assert_eq!(bind_vm("Exec", &[], "web"), Err(Refused::NoStart));
        assert_eq!(bind_vm("Logs", &[0xff], "web"), Err(Refused::Unreadable));
        assert_eq!(bind_vm("DeleteVm", &[], "web"), Err(Refused::Call));
    }
}
