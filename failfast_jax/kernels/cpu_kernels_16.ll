
%struct.Rotation = type { ptr, ptr, ptr, ptr, ptr, ptr, ptr, i64, i64, i64, i64, i64, i64, i64 }
%struct.XLA_FFI_Buffer = type { i64, ptr, i32, ptr, i64, ptr }
%struct.XLA_FFI_CallFrame = type { i64, ptr, ptr, ptr, i32, %struct.XLA_FFI_Args, %struct.XLA_FFI_Rets, %struct.XLA_FFI_Attrs, ptr }
%struct.XLA_FFI_Args = type { i64, ptr, i64, ptr, ptr }
%struct.XLA_FFI_Rets = type { i64, ptr, i64, ptr, ptr }
%struct.XLA_FFI_Attrs = type { i64, ptr, i64, ptr, ptr, ptr }
%struct.XLA_FFI_Extension_Base = type { i64, i32, ptr }
%struct.XLA_FFI_Metadata_Extension = type { %struct.XLA_FFI_Extension_Base, ptr }
%struct.XLA_FFI_Metadata = type { i64, %struct.XLA_FFI_Api_Version, i32, %struct.XLA_FFI_TypeId }
%struct.XLA_FFI_Api_Version = type { i64, ptr, i32, i32 }
%struct.XLA_FFI_TypeId = type { i64 }
%struct.XLA_FFI_Api = type { i64, ptr, %struct.XLA_FFI_Api_Version, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr }
%struct.XLA_FFI_ThreadPool_NumThreads_Args = type { i64, ptr, ptr, ptr }
%struct.Job = type { i64, i64, i64, i64, ptr, ptr }
%struct.XLA_FFI_ThreadPool_Schedule_Args = type { i64, ptr, ptr, ptr, ptr }
%struct.Rows = type { ptr, ptr, i64 }
%struct.Norm = type { ptr, ptr, ptr, float, i64, i64 }
%struct.Product = type { ptr, ptr, ptr, i64, i64, i64 }
%struct.Attention = type { ptr, ptr, ptr, ptr, ptr, ptr, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64 }
%struct.Blocks = type { ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, i64, i64, i64 }
%struct.XLA_FFI_Error_Destroy_Args = type { i64, ptr, ptr }
%struct.Block = type { ptr, ptr, [16 x i32], [16 x i32], i64 }

@head_dim = external constant i64, align 8
@outer = external constant i64, align 8
@group = external constant i64, align 8
@code_bits = external constant i64, align 8
@has_minimum = external constant i64, align 8

define ptr @failfast_rotate(ptr noundef %0) #0 {
  %2 = alloca ptr, align 8
  %3 = alloca ptr, align 8
  %4 = alloca ptr, align 8
  %5 = alloca ptr, align 8
  %6 = alloca ptr, align 8
  %7 = alloca ptr, align 8
  %8 = alloca ptr, align 8
  %9 = alloca i64, align 8
  %10 = alloca %struct.Rotation, align 8
  store ptr %0, ptr %3, align 8
  %11 = load ptr, ptr %3, align 8
  %12 = call i32 @is_registration(ptr noundef %11)
  %13 = icmp ne i32 %12, 0
  br i1 %13, label %14, label %15

14:
  store ptr null, ptr %2, align 8
  br label %105

15:
  %16 = load ptr, ptr %3, align 8
  %17 = call ptr @argument(ptr noundef %16, i64 noundef 0)
  store ptr %17, ptr %4, align 8
  %18 = load ptr, ptr %3, align 8
  %19 = call ptr @result(ptr noundef %18, i64 noundef 1)
  store ptr %19, ptr %5, align 8
  %20 = load ptr, ptr %3, align 8
  %21 = call ptr @argument(ptr noundef %20, i64 noundef 1)
  %22 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %21, i32 0, i32 3
  %23 = load ptr, ptr %22, align 8
  store ptr %23, ptr %6, align 8
  %24 = load ptr, ptr %3, align 8
  %25 = call ptr @argument(ptr noundef %24, i64 noundef 2)
  %26 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %25, i32 0, i32 3
  %27 = load ptr, ptr %26, align 8
  store ptr %27, ptr %7, align 8
  %28 = load ptr, ptr %4, align 8
  %29 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %28, i32 0, i32 5
  %30 = load ptr, ptr %29, align 8
  store ptr %30, ptr %8, align 8
  %31 = load ptr, ptr %3, align 8
  %32 = call ptr @argument(ptr noundef %31, i64 noundef 4)
  %33 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %32, i32 0, i32 3
  %34 = load ptr, ptr %33, align 8
  %35 = load i32, ptr %34, align 4
  %36 = sext i32 %35 to i64
  store i64 %36, ptr %9, align 8
  %37 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 0
  %38 = load ptr, ptr %4, align 8
  %39 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %38, i32 0, i32 3
  %40 = load ptr, ptr %39, align 8
  store ptr %40, ptr %37, align 8
  %41 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 1
  %42 = load ptr, ptr %6, align 8
  store ptr %42, ptr %41, align 8
  %43 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 2
  %44 = load ptr, ptr %7, align 8
  store ptr %44, ptr %43, align 8
  %45 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 3
  %46 = load ptr, ptr %3, align 8
  %47 = call ptr @argument(ptr noundef %46, i64 noundef 3)
  %48 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %47, i32 0, i32 3
  %49 = load ptr, ptr %48, align 8
  store ptr %49, ptr %45, align 8
  %50 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 4
  %51 = load ptr, ptr %3, align 8
  %52 = call ptr @result(ptr noundef %51, i64 noundef 0)
  %53 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %52, i32 0, i32 3
  %54 = load ptr, ptr %53, align 8
  store ptr %54, ptr %50, align 8
  %55 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 5
  %56 = load ptr, ptr %5, align 8
  %57 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %56, i32 0, i32 3
  %58 = load ptr, ptr %57, align 8
  store ptr %58, ptr %55, align 8
  %59 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 6
  %60 = load ptr, ptr %3, align 8
  %61 = call ptr @result(ptr noundef %60, i64 noundef 2)
  %62 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %61, i32 0, i32 3
  %63 = load ptr, ptr %62, align 8
  store ptr %63, ptr %59, align 8
  %64 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 7
  %65 = load ptr, ptr %8, align 8
  %66 = getelementptr inbounds i64, ptr %65, i64 0
  %67 = load i64, ptr %66, align 8
  %68 = load ptr, ptr %8, align 8
  %69 = getelementptr inbounds i64, ptr %68, i64 1
  %70 = load i64, ptr %69, align 8
  %71 = mul nsw i64 %67, %70
  store i64 %71, ptr %64, align 8
  %72 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 8
  %73 = load ptr, ptr %8, align 8
  %74 = getelementptr inbounds i64, ptr %73, i64 1
  %75 = load i64, ptr %74, align 8
  store i64 %75, ptr %72, align 8
  %76 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 9
  %77 = load ptr, ptr %8, align 8
  %78 = getelementptr inbounds i64, ptr %77, i64 2
  %79 = load i64, ptr %78, align 8
  store i64 %79, ptr %76, align 8
  %80 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 10
  %81 = load ptr, ptr %8, align 8
  %82 = getelementptr inbounds i64, ptr %81, i64 3
  %83 = load i64, ptr %82, align 8
  %84 = sub nsw i64 %83, 2
  store i64 %84, ptr %80, align 8
  %85 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 11
  %86 = load ptr, ptr %5, align 8
  %87 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %86, i32 0, i32 5
  %88 = load ptr, ptr %87, align 8
  %89 = getelementptr inbounds i64, ptr %88, i64 2
  %90 = load i64, ptr %89, align 8
  store i64 %90, ptr %85, align 8
  %91 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 12
  %92 = load ptr, ptr %5, align 8
  %93 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %92, i32 0, i32 5
  %94 = load ptr, ptr %93, align 8
  %95 = getelementptr inbounds i64, ptr %94, i64 1
  %96 = load i64, ptr %95, align 8
  store i64 %96, ptr %91, align 8
  %97 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 13
  %98 = load i64, ptr %9, align 8
  store i64 %98, ptr %97, align 8
  %99 = load ptr, ptr %3, align 8
  %100 = getelementptr inbounds nuw %struct.Rotation, ptr %10, i32 0, i32 7
  %101 = load i64, ptr %100, align 8
  %102 = add nsw i64 %101, 8
  %103 = sub nsw i64 %102, 1
  %104 = sdiv i64 %103, 8
  call void @parallel_for(ptr noundef %99, i64 noundef %104, ptr noundef @rotate_rows, ptr noundef %10)
  store ptr null, ptr %2, align 8
  br label %105

105:
  %106 = load ptr, ptr %2, align 8
  ret ptr %106
}

define internal i32 @is_registration(ptr noundef %0) #1 {
  %2 = alloca i32, align 4
  %3 = alloca ptr, align 8
  %4 = alloca ptr, align 8
  %5 = alloca i32, align 4
  %6 = alloca ptr, align 8
  store ptr %0, ptr %3, align 8
  %7 = load ptr, ptr %3, align 8
  %8 = getelementptr inbounds nuw %struct.XLA_FFI_CallFrame, ptr %7, i32 0, i32 1
  %9 = load ptr, ptr %8, align 8
  store ptr %9, ptr %4, align 8
  %10 = load ptr, ptr %4, align 8
  %11 = icmp ne ptr %10, null
  br i1 %11, label %12, label %17

12:
  %13 = load ptr, ptr %4, align 8
  %14 = getelementptr inbounds nuw %struct.XLA_FFI_Extension_Base, ptr %13, i32 0, i32 1
  %15 = load i32, ptr %14, align 8
  %16 = icmp ne i32 %15, 1
  br i1 %16, label %17, label %18

17:
  store i32 0, ptr %2, align 4
  store i32 1, ptr %5, align 4
  br label %34

18:
  %19 = load ptr, ptr %4, align 8
  %20 = getelementptr inbounds nuw %struct.XLA_FFI_Metadata_Extension, ptr %19, i32 0, i32 1
  %21 = load ptr, ptr %20, align 8
  store ptr %21, ptr %6, align 8
  %22 = load ptr, ptr %6, align 8
  %23 = getelementptr inbounds nuw %struct.XLA_FFI_Metadata, ptr %22, i32 0, i32 1
  %24 = getelementptr inbounds nuw %struct.XLA_FFI_Api_Version, ptr %23, i32 0, i32 2
  store i32 0, ptr %24, align 8
  %25 = load ptr, ptr %3, align 8
  %26 = getelementptr inbounds nuw %struct.XLA_FFI_CallFrame, ptr %25, i32 0, i32 2
  %27 = load ptr, ptr %26, align 8
  %28 = getelementptr inbounds nuw %struct.XLA_FFI_Api, ptr %27, i32 0, i32 2
  %29 = getelementptr inbounds nuw %struct.XLA_FFI_Api_Version, ptr %28, i32 0, i32 3
  %30 = load i32, ptr %29, align 4
  %31 = load ptr, ptr %6, align 8
  %32 = getelementptr inbounds nuw %struct.XLA_FFI_Metadata, ptr %31, i32 0, i32 1
  %33 = getelementptr inbounds nuw %struct.XLA_FFI_Api_Version, ptr %32, i32 0, i32 3
  store i32 %30, ptr %33, align 4
  store i32 1, ptr %2, align 4
  store i32 1, ptr %5, align 4
  br label %34

34:
  %35 = load i32, ptr %2, align 4
  ret i32 %35
}


define internal ptr @argument(ptr noundef %0, i64 noundef %1) #1 {
  %3 = alloca ptr, align 8
  %4 = alloca i64, align 8
  store ptr %0, ptr %3, align 8
  store i64 %1, ptr %4, align 8
  %5 = load ptr, ptr %3, align 8
  %6 = getelementptr inbounds nuw %struct.XLA_FFI_CallFrame, ptr %5, i32 0, i32 5
  %7 = getelementptr inbounds nuw %struct.XLA_FFI_Args, ptr %6, i32 0, i32 4
  %8 = load ptr, ptr %7, align 8
  %9 = load i64, ptr %4, align 8
  %10 = getelementptr inbounds ptr, ptr %8, i64 %9
  %11 = load ptr, ptr %10, align 8
  ret ptr %11
}

define internal ptr @result(ptr noundef %0, i64 noundef %1) #1 {
  %3 = alloca ptr, align 8
  %4 = alloca i64, align 8
  store ptr %0, ptr %3, align 8
  store i64 %1, ptr %4, align 8
  %5 = load ptr, ptr %3, align 8
  %6 = getelementptr inbounds nuw %struct.XLA_FFI_CallFrame, ptr %5, i32 0, i32 6
  %7 = getelementptr inbounds nuw %struct.XLA_FFI_Rets, ptr %6, i32 0, i32 4
  %8 = load ptr, ptr %7, align 8
  %9 = load i64, ptr %4, align 8
  %10 = getelementptr inbounds ptr, ptr %8, i64 %9
  %11 = load ptr, ptr %10, align 8
  ret ptr %11
}

define internal void @parallel_for(ptr noundef %0, i64 noundef %1, ptr noundef %2, ptr noundef %3) #1 {
  %5 = alloca ptr, align 8
  %6 = alloca i64, align 8
  %7 = alloca ptr, align 8
  %8 = alloca ptr, align 8
  %9 = alloca i64, align 8
  %10 = alloca %struct.XLA_FFI_ThreadPool_NumThreads_Args, align 8
  %11 = alloca ptr, align 8
  %12 = alloca i64, align 8
  %13 = alloca i32, align 4
  %14 = alloca i64, align 8
  %15 = alloca %struct.Job, align 8
  %16 = alloca %struct.XLA_FFI_ThreadPool_Schedule_Args, align 8
  %17 = alloca i64, align 8
  %18 = alloca i64, align 8
  store ptr %0, ptr %5, align 8
  store i64 %1, ptr %6, align 8
  store ptr %2, ptr %7, align 8
  store ptr %3, ptr %8, align 8
  store i64 1, ptr %9, align 8
  %19 = getelementptr inbounds nuw %struct.XLA_FFI_ThreadPool_NumThreads_Args, ptr %10, i32 0, i32 0
  store i64 32, ptr %19, align 8
  %20 = getelementptr inbounds nuw %struct.XLA_FFI_ThreadPool_NumThreads_Args, ptr %10, i32 0, i32 1
  store ptr null, ptr %20, align 8
  %21 = getelementptr inbounds nuw %struct.XLA_FFI_ThreadPool_NumThreads_Args, ptr %10, i32 0, i32 2
  %22 = load ptr, ptr %5, align 8
  %23 = getelementptr inbounds nuw %struct.XLA_FFI_CallFrame, ptr %22, i32 0, i32 3
  %24 = load ptr, ptr %23, align 8
  store ptr %24, ptr %21, align 8
  %25 = getelementptr inbounds nuw %struct.XLA_FFI_ThreadPool_NumThreads_Args, ptr %10, i32 0, i32 3
  store ptr %9, ptr %25, align 8
  %26 = load ptr, ptr %5, align 8
  %27 = load ptr, ptr %5, align 8
  %28 = getelementptr inbounds nuw %struct.XLA_FFI_CallFrame, ptr %27, i32 0, i32 2
  %29 = load ptr, ptr %28, align 8
  %30 = getelementptr inbounds nuw %struct.XLA_FFI_Api, ptr %29, i32 0, i32 16
  %31 = load ptr, ptr %30, align 8
  %32 = call ptr %31(ptr noundef %10)
  %33 = call i32 @failed(ptr noundef %26, ptr noundef %32)
  %34 = icmp ne i32 %33, 0
  br i1 %34, label %35, label %36

35:
  store i64 1, ptr %9, align 8
  br label %36

36:
  %37 = load i64, ptr %9, align 8
  %38 = icmp sgt i64 %37, 1
  br i1 %38, label %39, label %41

39:
  %40 = call noalias ptr @malloc(i64 noundef 48) #17
  br label %42

41:
  br label %42

42:
  %43 = phi ptr [ %40, %39 ], [ null, %41 ]
  store ptr %43, ptr %11, align 8
  %44 = load ptr, ptr %11, align 8
  %45 = icmp ne ptr %44, null
  br i1 %45, label %60, label %46

46:
  store i64 0, ptr %12, align 8
  br label %47

47:
  %48 = load i64, ptr %12, align 8
  %49 = load i64, ptr %6, align 8
  %50 = icmp slt i64 %48, %49
  br i1 %50, label %52, label %51

51:
  br label %59

52:
  %53 = load ptr, ptr %7, align 8
  %54 = load i64, ptr %12, align 8
  %55 = load ptr, ptr %8, align 8
  call void %53(i64 noundef %54, ptr noundef %55)
  br label %56

56:
  %57 = load i64, ptr %12, align 8
  %58 = add nsw i64 %57, 1
  store i64 %58, ptr %12, align 8
  br label %47, !llvm.loop !6

59:
  store i32 1, ptr %13, align 4
  br label %121

60:
  %61 = load i64, ptr %9, align 8
  %62 = sub nsw i64 %61, 1
  %63 = load i64, ptr %6, align 8
  %64 = sdiv i64 %63, 4
  %65 = call i64 @min_of(i64 noundef %62, i64 noundef %64)
  store i64 %65, ptr %14, align 8
  %66 = load ptr, ptr %11, align 8
  %67 = getelementptr inbounds nuw %struct.Job, ptr %15, i32 0, i32 0
  store i64 0, ptr %67, align 8
  %68 = getelementptr inbounds nuw %struct.Job, ptr %15, i32 0, i32 1
  store i64 0, ptr %68, align 8
  %69 = getelementptr inbounds nuw %struct.Job, ptr %15, i32 0, i32 2
  %70 = load i64, ptr %14, align 8
  %71 = add nsw i64 %70, 1
  store i64 %71, ptr %69, align 8
  %72 = getelementptr inbounds nuw %struct.Job, ptr %15, i32 0, i32 3
  %73 = load i64, ptr %6, align 8
  store i64 %73, ptr %72, align 8
  %74 = getelementptr inbounds nuw %struct.Job, ptr %15, i32 0, i32 4
  %75 = load ptr, ptr %7, align 8
  store ptr %75, ptr %74, align 8
  %76 = getelementptr inbounds nuw %struct.Job, ptr %15, i32 0, i32 5
  %77 = load ptr, ptr %8, align 8
  store ptr %77, ptr %76, align 8
  call void @llvm.memcpy.p0.p0.i64(ptr align 8 %66, ptr align 8 %15, i64 48, i1 false)
  %78 = getelementptr inbounds nuw %struct.XLA_FFI_ThreadPool_Schedule_Args, ptr %16, i32 0, i32 0
  store i64 40, ptr %78, align 8
  %79 = getelementptr inbounds nuw %struct.XLA_FFI_ThreadPool_Schedule_Args, ptr %16, i32 0, i32 1
  store ptr null, ptr %79, align 8
  %80 = getelementptr inbounds nuw %struct.XLA_FFI_ThreadPool_Schedule_Args, ptr %16, i32 0, i32 2
  %81 = load ptr, ptr %5, align 8
  %82 = getelementptr inbounds nuw %struct.XLA_FFI_CallFrame, ptr %81, i32 0, i32 3
  %83 = load ptr, ptr %82, align 8
  store ptr %83, ptr %80, align 8
  %84 = getelementptr inbounds nuw %struct.XLA_FFI_ThreadPool_Schedule_Args, ptr %16, i32 0, i32 3
  store ptr @run_helper, ptr %84, align 8
  %85 = getelementptr inbounds nuw %struct.XLA_FFI_ThreadPool_Schedule_Args, ptr %16, i32 0, i32 4
  %86 = load ptr, ptr %11, align 8
  store ptr %86, ptr %85, align 8
  store i64 0, ptr %17, align 8
  br label %87

87:
  %88 = load i64, ptr %17, align 8
  %89 = load i64, ptr %14, align 8
  %90 = icmp slt i64 %88, %89
  br i1 %90, label %92, label %91

91:
  store i32 5, ptr %13, align 4
  br label %108

92:
  %93 = load ptr, ptr %5, align 8
  %94 = load ptr, ptr %5, align 8
  %95 = getelementptr inbounds nuw %struct.XLA_FFI_CallFrame, ptr %94, i32 0, i32 2
  %96 = load ptr, ptr %95, align 8
  %97 = getelementptr inbounds nuw %struct.XLA_FFI_Api, ptr %96, i32 0, i32 15
  %98 = load ptr, ptr %97, align 8
  %99 = call ptr %98(ptr noundef %16)
  %100 = call i32 @failed(ptr noundef %93, ptr noundef %99)
  %101 = icmp ne i32 %100, 0
  br i1 %101, label %102, label %104

102:
  %103 = load ptr, ptr %11, align 8
  call void @release(ptr noundef %103)
  br label %104

104:
  br label %105

105:
  %106 = load i64, ptr %17, align 8
  %107 = add nsw i64 %106, 1
  store i64 %107, ptr %17, align 8
  br label %87, !llvm.loop !8

108:
  %109 = load ptr, ptr %11, align 8
  call void @take_pieces(ptr noundef %109)
  br label %110

110:
  %111 = load ptr, ptr %11, align 8
  %112 = getelementptr inbounds nuw %struct.Job, ptr %111, i32 0, i32 1
  %113 = load atomic i64, ptr %112 acquire, align 8
  store i64 %113, ptr %18, align 8
  %114 = load i64, ptr %18, align 8
  %115 = load i64, ptr %6, align 8
  %116 = icmp slt i64 %114, %115
  br i1 %116, label %117, label %119

117:
  %118 = call i32 @sched_yield()
  br label %110, !llvm.loop !9

119:
  %120 = load ptr, ptr %11, align 8
  call void @release(ptr noundef %120)
  store i32 0, ptr %13, align 4
  br label %121

121:
  %122 = load i32, ptr %13, align 4
  switch i32 %122, label %124 [
    i32 0, label %123
    i32 1, label %123
  ]

123:
  ret void

124:
  unreachable
}

define internal void @rotate_rows(i64 noundef %0, ptr noundef %1) #3 {
  %3 = alloca i64, align 8
  %4 = alloca ptr, align 8
  %5 = alloca ptr, align 8
  %6 = alloca ptr, align 8
  %7 = alloca i64, align 8
  %8 = alloca i64, align 8
  %9 = alloca i32, align 4
  %10 = alloca i64, align 8
  %11 = alloca i64, align 8
  %12 = alloca ptr, align 8
  %13 = alloca ptr, align 8
  %14 = alloca i64, align 8
  %15 = alloca ptr, align 8
  %16 = alloca ptr, align 8
  %17 = alloca i64, align 8
  %18 = alloca ptr, align 8
  %19 = alloca i64, align 8
  %20 = alloca i64, align 8
  %21 = alloca i64, align 8
  %22 = alloca <16 x float>, align 64
  %23 = alloca <16 x float>, align 64
  %24 = alloca <16 x i32>, align 64
  store i64 %0, ptr %3, align 8
  store ptr %1, ptr %4, align 8
  %25 = load ptr, ptr %4, align 8
  store ptr %25, ptr %5, align 8
  %26 = load i64, ptr @head_dim, align 8
  %27 = call ptr @llvm.stacksave.p0()
  store ptr %27, ptr %6, align 8
  %28 = alloca float, i64 %26, align 16
  store i64 %26, ptr %7, align 8
  %29 = load i64, ptr %3, align 8
  %30 = mul nsw i64 %29, 8
  store i64 %30, ptr %8, align 8
  br label %31

31:
  %32 = load i64, ptr %8, align 8
  %33 = load i64, ptr %3, align 8
  %34 = add nsw i64 %33, 1
  %35 = mul nsw i64 %34, 8
  %36 = load ptr, ptr %5, align 8
  %37 = getelementptr inbounds nuw %struct.Rotation, ptr %36, i32 0, i32 7
  %38 = load i64, ptr %37, align 8
  %39 = call i64 @min_of(i64 noundef %35, i64 noundef %38)
  %40 = icmp slt i64 %32, %39
  br i1 %40, label %42, label %41

41:
  store i32 2, ptr %9, align 4
  br label %247

42:
  %43 = load i64, ptr %8, align 8
  %44 = load ptr, ptr %5, align 8
  %45 = getelementptr inbounds nuw %struct.Rotation, ptr %44, i32 0, i32 8
  %46 = load i64, ptr %45, align 8
  %47 = sdiv i64 %43, %46
  store i64 %47, ptr %10, align 8
  %48 = load ptr, ptr %5, align 8
  %49 = getelementptr inbounds nuw %struct.Rotation, ptr %48, i32 0, i32 3
  %50 = load ptr, ptr %49, align 8
  %51 = load i64, ptr %10, align 8
  %52 = getelementptr inbounds i32, ptr %50, i64 %51
  %53 = load i32, ptr %52, align 4
  %54 = sext i32 %53 to i64
  %55 = load ptr, ptr %5, align 8
  %56 = getelementptr inbounds nuw %struct.Rotation, ptr %55, i32 0, i32 11
  %57 = load i64, ptr %56, align 8
  %58 = load ptr, ptr %5, align 8
  %59 = getelementptr inbounds nuw %struct.Rotation, ptr %58, i32 0, i32 8
  %60 = load i64, ptr %59, align 8
  %61 = sub nsw i64 %57, %60
  %62 = call i64 @min_of(i64 noundef %54, i64 noundef %61)
  %63 = call i64 @max_of(i64 noundef %62, i64 noundef 0)
  store i64 %63, ptr %11, align 8
  %64 = load ptr, ptr %5, align 8
  %65 = getelementptr inbounds nuw %struct.Rotation, ptr %64, i32 0, i32 1
  %66 = load ptr, ptr %65, align 8
  %67 = load i64, ptr %8, align 8
  %68 = load i64, ptr @head_dim, align 8
  %69 = sdiv i64 %68, 2
  %70 = mul nsw i64 %67, %69
  %71 = getelementptr inbounds float, ptr %66, i64 %70
  store ptr %71, ptr %12, align 8
  %72 = load ptr, ptr %5, align 8
  %73 = getelementptr inbounds nuw %struct.Rotation, ptr %72, i32 0, i32 2
  %74 = load ptr, ptr %73, align 8
  %75 = load i64, ptr %8, align 8
  %76 = load i64, ptr @head_dim, align 8
  %77 = sdiv i64 %76, 2
  %78 = mul nsw i64 %75, %77
  %79 = getelementptr inbounds float, ptr %74, i64 %78
  store ptr %79, ptr %13, align 8
  store i64 0, ptr %14, align 8
  br label %80

80:
  %81 = load i64, ptr %14, align 8
  %82 = load ptr, ptr %5, align 8
  %83 = getelementptr inbounds nuw %struct.Rotation, ptr %82, i32 0, i32 9
  %84 = load i64, ptr %83, align 8
  %85 = icmp slt i64 %81, %84
  br i1 %85, label %87, label %86

86:
  store i32 5, ptr %9, align 4
  br label %243

87:
  %88 = load ptr, ptr %5, align 8
  %89 = getelementptr inbounds nuw %struct.Rotation, ptr %88, i32 0, i32 0
  %90 = load ptr, ptr %89, align 8
  %91 = load i64, ptr %8, align 8
  %92 = load ptr, ptr %5, align 8
  %93 = getelementptr inbounds nuw %struct.Rotation, ptr %92, i32 0, i32 9
  %94 = load i64, ptr %93, align 8
  %95 = mul nsw i64 %91, %94
  %96 = load i64, ptr %14, align 8
  %97 = add nsw i64 %95, %96
  %98 = load ptr, ptr %5, align 8
  %99 = getelementptr inbounds nuw %struct.Rotation, ptr %98, i32 0, i32 10
  %100 = load i64, ptr %99, align 8
  %101 = add nsw i64 %100, 2
  %102 = mul nsw i64 %97, %101
  %103 = load i64, ptr @head_dim, align 8
  %104 = mul nsw i64 %102, %103
  %105 = getelementptr inbounds float, ptr %90, i64 %104
  store ptr %105, ptr %15, align 8
  %106 = load ptr, ptr %5, align 8
  %107 = getelementptr inbounds nuw %struct.Rotation, ptr %106, i32 0, i32 4
  %108 = load ptr, ptr %107, align 8
  %109 = load i64, ptr %8, align 8
  %110 = load ptr, ptr %5, align 8
  %111 = getelementptr inbounds nuw %struct.Rotation, ptr %110, i32 0, i32 9
  %112 = load i64, ptr %111, align 8
  %113 = mul nsw i64 %109, %112
  %114 = load i64, ptr %14, align 8
  %115 = add nsw i64 %113, %114
  %116 = load ptr, ptr %5, align 8
  %117 = getelementptr inbounds nuw %struct.Rotation, ptr %116, i32 0, i32 10
  %118 = load i64, ptr %117, align 8
  %119 = mul nsw i64 %115, %118
  %120 = load i64, ptr @head_dim, align 8
  %121 = mul nsw i64 %119, %120
  %122 = getelementptr inbounds float, ptr %108, i64 %121
  store ptr %122, ptr %16, align 8
  store i64 0, ptr %17, align 8
  br label %123

123:
  %124 = load i64, ptr %17, align 8
  %125 = load ptr, ptr %5, align 8
  %126 = getelementptr inbounds nuw %struct.Rotation, ptr %125, i32 0, i32 10
  %127 = load i64, ptr %126, align 8
  %128 = icmp slt i64 %124, %127
  br i1 %128, label %130, label %129

129:
  store i32 8, ptr %9, align 4
  br label %146

130:
  %131 = load ptr, ptr %15, align 8
  %132 = load i64, ptr %17, align 8
  %133 = load i64, ptr @head_dim, align 8
  %134 = mul nsw i64 %132, %133
  %135 = getelementptr inbounds float, ptr %131, i64 %134
  %136 = load ptr, ptr %12, align 8
  %137 = load ptr, ptr %13, align 8
  %138 = load ptr, ptr %16, align 8
  %139 = load i64, ptr %17, align 8
  %140 = load i64, ptr @head_dim, align 8
  %141 = mul nsw i64 %139, %140
  %142 = getelementptr inbounds float, ptr %138, i64 %141
  call void @rotate_head(ptr noundef %135, ptr noundef %136, ptr noundef %137, ptr noundef %142)
  br label %143

143:
  %144 = load i64, ptr %17, align 8
  %145 = add nsw i64 %144, 1
  store i64 %145, ptr %17, align 8
  br label %123, !llvm.loop !10

146:
  %147 = load ptr, ptr %15, align 8
  %148 = load ptr, ptr %5, align 8
  %149 = getelementptr inbounds nuw %struct.Rotation, ptr %148, i32 0, i32 10
  %150 = load i64, ptr %149, align 8
  %151 = load i64, ptr @head_dim, align 8
  %152 = mul nsw i64 %150, %151
  %153 = getelementptr inbounds float, ptr %147, i64 %152
  %154 = load ptr, ptr %12, align 8
  %155 = load ptr, ptr %13, align 8
  call void @rotate_head(ptr noundef %153, ptr noundef %154, ptr noundef %155, ptr noundef %28)
  %156 = load ptr, ptr %15, align 8
  %157 = load ptr, ptr %5, align 8
  %158 = getelementptr inbounds nuw %struct.Rotation, ptr %157, i32 0, i32 10
  %159 = load i64, ptr %158, align 8
  %160 = add nsw i64 %159, 1
  %161 = load i64, ptr @head_dim, align 8
  %162 = mul nsw i64 %160, %161
  %163 = getelementptr inbounds float, ptr %156, i64 %162
  store ptr %163, ptr %18, align 8
  %164 = load i64, ptr %10, align 8
  %165 = load ptr, ptr %5, align 8
  %166 = getelementptr inbounds nuw %struct.Rotation, ptr %165, i32 0, i32 12
  %167 = load i64, ptr %166, align 8
  %168 = mul nsw i64 %164, %167
  %169 = load ptr, ptr %5, align 8
  %170 = getelementptr inbounds nuw %struct.Rotation, ptr %169, i32 0, i32 13
  %171 = load i64, ptr %170, align 8
  %172 = add nsw i64 %168, %171
  %173 = load i64, ptr %14, align 8
  %174 = add nsw i64 %172, %173
  store i64 %174, ptr %19, align 8
  %175 = load i64, ptr %19, align 8
  %176 = load ptr, ptr %5, align 8
  %177 = getelementptr inbounds nuw %struct.Rotation, ptr %176, i32 0, i32 11
  %178 = load i64, ptr %177, align 8
  %179 = mul nsw i64 %175, %178
  %180 = load i64, ptr %11, align 8
  %181 = add nsw i64 %179, %180
  %182 = load i64, ptr %8, align 8
  %183 = load ptr, ptr %5, align 8
  %184 = getelementptr inbounds nuw %struct.Rotation, ptr %183, i32 0, i32 8
  %185 = load i64, ptr %184, align 8
  %186 = srem i64 %182, %185
  %187 = add nsw i64 %181, %186
  %188 = load i64, ptr @head_dim, align 8
  %189 = mul nsw i64 %187, %188
  store i64 %189, ptr %20, align 8
  store i64 0, ptr %21, align 8
  br label %190

190:
  %191 = load i64, ptr %21, align 8
  %192 = load i64, ptr @head_dim, align 8
  %193 = icmp slt i64 %191, %192
  br i1 %193, label %195, label %194

194:
  store i32 11, ptr %9, align 4
  br label %239

195:
  %196 = load i64, ptr %21, align 8
  %197 = getelementptr inbounds float, ptr %28, i64 %196
  %198 = call <16 x float> @load(ptr noundef %197, i32 noundef 0)
  store <16 x float> %198, ptr %22, align 64
  %199 = load ptr, ptr %18, align 8
  %200 = load i64, ptr %21, align 8
  %201 = getelementptr inbounds float, ptr %199, i64 %200
  %202 = call <16 x float> @load(ptr noundef %201, i32 noundef 0)
  store <16 x float> %202, ptr %23, align 64
  %203 = load <16 x float>, ptr %23, align 64
  %204 = load <16 x float>, ptr %23, align 64
  %205 = fsub <16 x float> %203, %204
  %206 = fcmp oeq <16 x float> %205, zeroinitializer
  %207 = sext <16 x i1> %206 to <16 x i32>
  store <16 x i32> %207, ptr %24, align 64
  %208 = load ptr, ptr %5, align 8
  %209 = getelementptr inbounds nuw %struct.Rotation, ptr %208, i32 0, i32 5
  %210 = load ptr, ptr %209, align 8
  %211 = load i64, ptr %20, align 8
  %212 = getelementptr inbounds float, ptr %210, i64 %211
  %213 = load i64, ptr %21, align 8
  %214 = getelementptr inbounds float, ptr %212, i64 %213
  %215 = load <16 x i32>, ptr %24, align 64
  %216 = load <16 x float>, ptr %22, align 64
  %217 = load <16 x float>, ptr %22, align 64
  %218 = fsub <16 x float> %216, %217
  %219 = fcmp oeq <16 x float> %218, zeroinitializer
  %220 = sext <16 x i1> %219 to <16 x i32>
  %221 = and <16 x i32> %215, %220
  %222 = load <16 x float>, ptr %22, align 64
  %223 = icmp slt <16 x i32> %221, zeroinitializer
  %224 = select <16 x i1> %223, <16 x float> %222, <16 x float> splat (float 0x7FF8000000000000)
  call void @store(ptr noundef %214, <16 x float> noundef %224)
  %225 = load ptr, ptr %5, align 8
  %226 = getelementptr inbounds nuw %struct.Rotation, ptr %225, i32 0, i32 6
  %227 = load ptr, ptr %226, align 8
  %228 = load i64, ptr %20, align 8
  %229 = getelementptr inbounds float, ptr %227, i64 %228
  %230 = load i64, ptr %21, align 8
  %231 = getelementptr inbounds float, ptr %229, i64 %230
  %232 = load <16 x i32>, ptr %24, align 64
  %233 = load <16 x float>, ptr %23, align 64
  %234 = icmp slt <16 x i32> %232, zeroinitializer
  %235 = select <16 x i1> %234, <16 x float> %233, <16 x float> zeroinitializer
  call void @store(ptr noundef %231, <16 x float> noundef %235)
  br label %236

236:
  %237 = load i64, ptr %21, align 8
  %238 = add nsw i64 %237, 16
  store i64 %238, ptr %21, align 8
  br label %190, !llvm.loop !11

239:
  br label %240

240:
  %241 = load i64, ptr %14, align 8
  %242 = add nsw i64 %241, 1
  store i64 %242, ptr %14, align 8
  br label %80, !llvm.loop !12

243:
  br label %244

244:
  %245 = load i64, ptr %8, align 8
  %246 = add nsw i64 %245, 1
  store i64 %246, ptr %8, align 8
  br label %31, !llvm.loop !13

247:
  %248 = load ptr, ptr %6, align 8
  call void @llvm.stackrestore.p0(ptr %248)
  ret void
}


define ptr @failfast_argmax(ptr noundef %0) #0 {
  %2 = alloca ptr, align 8
  %3 = alloca ptr, align 8
  %4 = alloca ptr, align 8
  %5 = alloca %struct.Rows, align 8
  store ptr %0, ptr %3, align 8
  %6 = load ptr, ptr %3, align 8
  %7 = call i32 @is_registration(ptr noundef %6)
  %8 = icmp ne i32 %7, 0
  br i1 %8, label %9, label %10

9:
  store ptr null, ptr %2, align 8
  br label %34

10:
  %11 = load ptr, ptr %3, align 8
  %12 = call ptr @argument(ptr noundef %11, i64 noundef 0)
  store ptr %12, ptr %4, align 8
  %13 = getelementptr inbounds nuw %struct.Rows, ptr %5, i32 0, i32 0
  %14 = load ptr, ptr %4, align 8
  %15 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %14, i32 0, i32 3
  %16 = load ptr, ptr %15, align 8
  store ptr %16, ptr %13, align 8
  %17 = getelementptr inbounds nuw %struct.Rows, ptr %5, i32 0, i32 1
  %18 = load ptr, ptr %3, align 8
  %19 = call ptr @result(ptr noundef %18, i64 noundef 0)
  %20 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %19, i32 0, i32 3
  %21 = load ptr, ptr %20, align 8
  store ptr %21, ptr %17, align 8
  %22 = getelementptr inbounds nuw %struct.Rows, ptr %5, i32 0, i32 2
  %23 = load ptr, ptr %4, align 8
  %24 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %23, i32 0, i32 5
  %25 = load ptr, ptr %24, align 8
  %26 = getelementptr inbounds i64, ptr %25, i64 1
  %27 = load i64, ptr %26, align 8
  store i64 %27, ptr %22, align 8
  %28 = load ptr, ptr %3, align 8
  %29 = load ptr, ptr %4, align 8
  %30 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %29, i32 0, i32 5
  %31 = load ptr, ptr %30, align 8
  %32 = getelementptr inbounds i64, ptr %31, i64 0
  %33 = load i64, ptr %32, align 8
  call void @parallel_for(ptr noundef %28, i64 noundef %33, ptr noundef @argmax_row, ptr noundef %5)
  store ptr null, ptr %2, align 8
  br label %34

34:
  %35 = load ptr, ptr %2, align 8
  ret ptr %35
}

define internal void @argmax_row(i64 noundef %0, ptr noundef %1) #3 {
  %3 = alloca i64, align 8
  %4 = alloca ptr, align 8
  %5 = alloca ptr, align 8
  %6 = alloca <16 x float>, align 64
  %7 = alloca <16 x i32>, align 64
  %8 = alloca <16 x i32>, align 64
  %9 = alloca i64, align 8
  %10 = alloca i64, align 8
  %11 = alloca <16 x float>, align 64
  %12 = alloca <16 x i32>, align 64
  %13 = alloca float, align 4
  %14 = alloca i64, align 8
  %15 = alloca i32, align 4
  %16 = alloca i32, align 4
  store i64 %0, ptr %3, align 8
  store ptr %1, ptr %4, align 8
  %17 = load ptr, ptr %4, align 8
  store ptr %17, ptr %5, align 8
  store <16 x float> splat (float 0xFFF0000000000000), ptr %6, align 64
  store <16 x i32> zeroinitializer, ptr %7, align 64
  store <16 x i32> zeroinitializer, ptr %8, align 64
  store i64 0, ptr %9, align 8
  br label %18

18:
  %19 = load i64, ptr %9, align 8
  %20 = load ptr, ptr %5, align 8
  %21 = getelementptr inbounds nuw %struct.Rows, ptr %20, i32 0, i32 2
  %22 = load i64, ptr %21, align 8
  %23 = icmp slt i64 %19, %22
  br i1 %23, label %25, label %24

24:
  br label %70

25:
  %26 = load i64, ptr %9, align 8
  %27 = load ptr, ptr %5, align 8
  %28 = getelementptr inbounds nuw %struct.Rows, ptr %27, i32 0, i32 2
  %29 = load i64, ptr %28, align 8
  %30 = sub nsw i64 %29, 16
  %31 = call i64 @min_of(i64 noundef %26, i64 noundef %30)
  store i64 %31, ptr %10, align 8
  %32 = load ptr, ptr %5, align 8
  %33 = getelementptr inbounds nuw %struct.Rows, ptr %32, i32 0, i32 0
  %34 = load ptr, ptr %33, align 8
  %35 = load i64, ptr %3, align 8
  %36 = load ptr, ptr %5, align 8
  %37 = getelementptr inbounds nuw %struct.Rows, ptr %36, i32 0, i32 2
  %38 = load i64, ptr %37, align 8
  %39 = mul nsw i64 %35, %38
  %40 = getelementptr inbounds float, ptr %34, i64 %39
  %41 = load i64, ptr %10, align 8
  %42 = getelementptr inbounds float, ptr %40, i64 %41
  %43 = call <16 x float> @load(ptr noundef %42, i32 noundef 0)
  store <16 x float> %43, ptr %11, align 64
  %44 = load <16 x float>, ptr %11, align 64
  %45 = load <16 x float>, ptr %6, align 64
  %46 = fcmp ogt <16 x float> %44, %45
  %47 = sext <16 x i1> %46 to <16 x i32>
  store <16 x i32> %47, ptr %12, align 64
  %48 = load <16 x float>, ptr %11, align 64
  %49 = load <16 x float>, ptr %11, align 64
  %50 = fcmp une <16 x float> %48, %49
  %51 = sext <16 x i1> %50 to <16 x i32>
  %52 = load <16 x i32>, ptr %7, align 64
  %53 = or <16 x i32> %52, %51
  store <16 x i32> %53, ptr %7, align 64
  %54 = load <16 x i32>, ptr %12, align 64
  %55 = load <16 x float>, ptr %11, align 64
  %56 = load <16 x float>, ptr %6, align 64
  %57 = icmp slt <16 x i32> %54, zeroinitializer
  %58 = select <16 x i1> %57, <16 x float> %55, <16 x float> %56
  store <16 x float> %58, ptr %6, align 64
  %59 = load <16 x i32>, ptr %12, align 64
  %60 = load i64, ptr %10, align 8
  %61 = trunc i64 %60 to i32
  %62 = insertelement <16 x i32> poison, i32 %61, i64 0
  %63 = shufflevector <16 x i32> %62, <16 x i32> poison, <16 x i32> zeroinitializer
  %64 = load <16 x i32>, ptr %8, align 64
  %65 = icmp slt <16 x i32> %59, zeroinitializer
  %66 = select <16 x i1> %65, <16 x i32> %63, <16 x i32> %64
  store <16 x i32> %66, ptr %8, align 64
  br label %67

67:
  %68 = load i64, ptr %9, align 8
  %69 = add nsw i64 %68, 16
  store i64 %69, ptr %9, align 8
  br label %18, !llvm.loop !14

70:
  %71 = load <16 x float>, ptr %6, align 64
  %72 = extractelement <16 x float> %71, i32 0
  store float %72, ptr %13, align 4
  %73 = load <16 x i32>, ptr %8, align 64
  %74 = extractelement <16 x i32> %73, i32 0
  %75 = sext i32 %74 to i64
  store i64 %75, ptr %14, align 8
  store i32 0, ptr %15, align 4
  store i32 0, ptr %16, align 4
  br label %76

76:
  %77 = load i32, ptr %16, align 4
  %78 = icmp slt i32 %77, 16
  br i1 %78, label %80, label %79

79:
  br label %120

80:
  %81 = load <16 x float>, ptr %6, align 64
  %82 = load i32, ptr %16, align 4
  %83 = extractelement <16 x float> %81, i32 %82
  %84 = load float, ptr %13, align 4
  %85 = fcmp ogt float %83, %84
  br i1 %85, label %101, label %86

86:
  %87 = load <16 x float>, ptr %6, align 64
  %88 = load i32, ptr %16, align 4
  %89 = extractelement <16 x float> %87, i32 %88
  %90 = load float, ptr %13, align 4
  %91 = fcmp oeq float %89, %90
  br i1 %91, label %92, label %111

92:
  %93 = load <16 x i32>, ptr %8, align 64
  %94 = load i32, ptr %16, align 4
  %95 = extractelement <16 x i32> %93, i32 %94
  %96 = load i32, ptr %16, align 4
  %97 = add nsw i32 %95, %96
  %98 = sext i32 %97 to i64
  %99 = load i64, ptr %14, align 8
  %100 = icmp slt i64 %98, %99
  br i1 %100, label %101, label %111

101:
  %102 = load <16 x float>, ptr %6, align 64
  %103 = load i32, ptr %16, align 4
  %104 = extractelement <16 x float> %102, i32 %103
  store float %104, ptr %13, align 4
  %105 = load <16 x i32>, ptr %8, align 64
  %106 = load i32, ptr %16, align 4
  %107 = extractelement <16 x i32> %105, i32 %106
  %108 = load i32, ptr %16, align 4
  %109 = add nsw i32 %107, %108
  %110 = sext i32 %109 to i64
  store i64 %110, ptr %14, align 8
  br label %111

111:
  %112 = load <16 x i32>, ptr %7, align 64
  %113 = load i32, ptr %16, align 4
  %114 = extractelement <16 x i32> %112, i32 %113
  %115 = load i32, ptr %15, align 4
  %116 = or i32 %115, %114
  store i32 %116, ptr %15, align 4
  br label %117

117:
  %118 = load i32, ptr %16, align 4
  %119 = add nsw i32 %118, 1
  store i32 %119, ptr %16, align 4
  br label %76, !llvm.loop !15

120:
  %121 = load i32, ptr %15, align 4
  %122 = icmp ne i32 %121, 0
  br i1 %122, label %123, label %127

123:
  %124 = load ptr, ptr %5, align 8
  %125 = getelementptr inbounds nuw %struct.Rows, ptr %124, i32 0, i32 2
  %126 = load i64, ptr %125, align 8
  br label %129

127:
  %128 = load i64, ptr %14, align 8
  br label %129

129:
  %130 = phi i64 [ %126, %123 ], [ %128, %127 ]
  %131 = trunc i64 %130 to i32
  %132 = load ptr, ptr %5, align 8
  %133 = getelementptr inbounds nuw %struct.Rows, ptr %132, i32 0, i32 1
  %134 = load ptr, ptr %133, align 8
  %135 = load i64, ptr %3, align 8
  %136 = getelementptr inbounds i32, ptr %134, i64 %135
  store i32 %131, ptr %136, align 4
  ret void
}

define ptr @failfast_rms_norm(ptr noundef %0) #0 {
  %2 = alloca ptr, align 8
  %3 = alloca ptr, align 8
  %4 = alloca ptr, align 8
  %5 = alloca float, align 4
  %6 = alloca %struct.Norm, align 8
  store ptr %0, ptr %3, align 8
  %7 = load ptr, ptr %3, align 8
  %8 = call i32 @is_registration(ptr noundef %7)
  %9 = icmp ne i32 %8, 0
  br i1 %9, label %10, label %11

10:
  store ptr null, ptr %2, align 8
  br label %54

11:
  %12 = load ptr, ptr %3, align 8
  %13 = call ptr @argument(ptr noundef %12, i64 noundef 0)
  store ptr %13, ptr %4, align 8
  %14 = load ptr, ptr %3, align 8
  %15 = call ptr @argument(ptr noundef %14, i64 noundef 2)
  %16 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %15, i32 0, i32 3
  %17 = load ptr, ptr %16, align 8
  %18 = load float, ptr %17, align 4
  store float %18, ptr %5, align 4
  %19 = getelementptr inbounds nuw %struct.Norm, ptr %6, i32 0, i32 0
  %20 = load ptr, ptr %4, align 8
  %21 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %20, i32 0, i32 3
  %22 = load ptr, ptr %21, align 8
  store ptr %22, ptr %19, align 8
  %23 = getelementptr inbounds nuw %struct.Norm, ptr %6, i32 0, i32 1
  %24 = load ptr, ptr %3, align 8
  %25 = call ptr @argument(ptr noundef %24, i64 noundef 1)
  %26 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %25, i32 0, i32 3
  %27 = load ptr, ptr %26, align 8
  store ptr %27, ptr %23, align 8
  %28 = getelementptr inbounds nuw %struct.Norm, ptr %6, i32 0, i32 2
  %29 = load ptr, ptr %3, align 8
  %30 = call ptr @result(ptr noundef %29, i64 noundef 0)
  %31 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %30, i32 0, i32 3
  %32 = load ptr, ptr %31, align 8
  store ptr %32, ptr %28, align 8
  %33 = getelementptr inbounds nuw %struct.Norm, ptr %6, i32 0, i32 3
  %34 = load float, ptr %5, align 4
  store float %34, ptr %33, align 8
  %35 = getelementptr i8, ptr %6, i64 28
  call void @llvm.memset.p0.i64(ptr align 4 %35, i8 0, i64 4, i1 false)
  %36 = getelementptr inbounds nuw %struct.Norm, ptr %6, i32 0, i32 4
  %37 = load ptr, ptr %4, align 8
  %38 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %37, i32 0, i32 5
  %39 = load ptr, ptr %38, align 8
  %40 = getelementptr inbounds i64, ptr %39, i64 0
  %41 = load i64, ptr %40, align 8
  store i64 %41, ptr %36, align 8
  %42 = getelementptr inbounds nuw %struct.Norm, ptr %6, i32 0, i32 5
  %43 = load ptr, ptr %4, align 8
  %44 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %43, i32 0, i32 5
  %45 = load ptr, ptr %44, align 8
  %46 = getelementptr inbounds i64, ptr %45, i64 1
  %47 = load i64, ptr %46, align 8
  store i64 %47, ptr %42, align 8
  %48 = load ptr, ptr %3, align 8
  %49 = getelementptr inbounds nuw %struct.Norm, ptr %6, i32 0, i32 4
  %50 = load i64, ptr %49, align 8
  %51 = add nsw i64 %50, 64
  %52 = sub nsw i64 %51, 1
  %53 = sdiv i64 %52, 64
  call void @parallel_for(ptr noundef %48, i64 noundef %53, ptr noundef @norms, ptr noundef %6)
  store ptr null, ptr %2, align 8
  br label %54

54:
  %55 = load ptr, ptr %2, align 8
  ret ptr %55
}

declare void @llvm.memset.p0.i64(ptr writeonly captures(none), i8, i64, i1 immarg) #4

define internal void @norms(i64 noundef %0, ptr noundef %1) #3 {
  %3 = alloca i64, align 8
  %4 = alloca ptr, align 8
  %5 = alloca ptr, align 8
  %6 = alloca i64, align 8
  %7 = alloca i64, align 8
  %8 = alloca i64, align 8
  %9 = alloca i32, align 4
  %10 = alloca ptr, align 8
  %11 = alloca ptr, align 8
  %12 = alloca <16 x float>, align 64
  %13 = alloca i64, align 8
  %14 = alloca float, align 4
  %15 = alloca i64, align 8
  %16 = alloca float, align 4
  %17 = alloca i64, align 8
  %18 = alloca i64, align 8
  store i64 %0, ptr %3, align 8
  store ptr %1, ptr %4, align 8
  %19 = load ptr, ptr %4, align 8
  store ptr %19, ptr %5, align 8
  %20 = load ptr, ptr %5, align 8
  %21 = getelementptr inbounds nuw %struct.Norm, ptr %20, i32 0, i32 5
  %22 = load i64, ptr %21, align 8
  %23 = and i64 %22, -16
  store i64 %23, ptr %6, align 8
  %24 = load i64, ptr %3, align 8
  %25 = add nsw i64 %24, 1
  %26 = mul nsw i64 %25, 64
  %27 = load ptr, ptr %5, align 8
  %28 = getelementptr inbounds nuw %struct.Norm, ptr %27, i32 0, i32 4
  %29 = load i64, ptr %28, align 8
  %30 = call i64 @min_of(i64 noundef %26, i64 noundef %29)
  store i64 %30, ptr %7, align 8
  %31 = load i64, ptr %3, align 8
  %32 = mul nsw i64 %31, 64
  store i64 %32, ptr %8, align 8
  br label %33

33:
  %34 = load i64, ptr %8, align 8
  %35 = load i64, ptr %7, align 8
  %36 = icmp slt i64 %34, %35
  br i1 %36, label %38, label %37

37:
  store i32 2, ptr %9, align 4
  br label %174

38:
  %39 = load ptr, ptr %5, align 8
  %40 = getelementptr inbounds nuw %struct.Norm, ptr %39, i32 0, i32 0
  %41 = load ptr, ptr %40, align 8
  %42 = load i64, ptr %8, align 8
  %43 = load ptr, ptr %5, align 8
  %44 = getelementptr inbounds nuw %struct.Norm, ptr %43, i32 0, i32 5
  %45 = load i64, ptr %44, align 8
  %46 = mul nsw i64 %42, %45
  %47 = getelementptr inbounds float, ptr %41, i64 %46
  store ptr %47, ptr %10, align 8
  %48 = load ptr, ptr %5, align 8
  %49 = getelementptr inbounds nuw %struct.Norm, ptr %48, i32 0, i32 2
  %50 = load ptr, ptr %49, align 8
  %51 = load i64, ptr %8, align 8
  %52 = load ptr, ptr %5, align 8
  %53 = getelementptr inbounds nuw %struct.Norm, ptr %52, i32 0, i32 5
  %54 = load i64, ptr %53, align 8
  %55 = mul nsw i64 %51, %54
  %56 = getelementptr inbounds float, ptr %50, i64 %55
  store ptr %56, ptr %11, align 8
  store <16 x float> zeroinitializer, ptr %12, align 64
  store i64 0, ptr %13, align 8
  br label %57

57:
  %58 = load i64, ptr %13, align 8
  %59 = load i64, ptr %6, align 8
  %60 = icmp slt i64 %58, %59
  br i1 %60, label %62, label %61

61:
  store i32 5, ptr %9, align 4
  br label %76

62:
  %63 = load ptr, ptr %10, align 8
  %64 = load i64, ptr %13, align 8
  %65 = getelementptr inbounds float, ptr %63, i64 %64
  %66 = call <16 x float> @load(ptr noundef %65, i32 noundef 0)
  %67 = load ptr, ptr %10, align 8
  %68 = load i64, ptr %13, align 8
  %69 = getelementptr inbounds float, ptr %67, i64 %68
  %70 = call <16 x float> @load(ptr noundef %69, i32 noundef 0)
  %71 = load <16 x float>, ptr %12, align 64
  %72 = call <16 x float> @fma_(<16 x float> noundef %66, <16 x float> noundef %70, <16 x float> noundef %71)
  store <16 x float> %72, ptr %12, align 64
  br label %73

73:
  %74 = load i64, ptr %13, align 8
  %75 = add nsw i64 %74, 16
  store i64 %75, ptr %13, align 8
  br label %57, !llvm.loop !16

76:
  %77 = load <16 x float>, ptr %12, align 64
  %78 = call float @sum(<16 x float> noundef %77)
  store float %78, ptr %14, align 4
  %79 = load i64, ptr %6, align 8
  store i64 %79, ptr %15, align 8
  br label %80

80:
  %81 = load i64, ptr %15, align 8
  %82 = load ptr, ptr %5, align 8
  %83 = getelementptr inbounds nuw %struct.Norm, ptr %82, i32 0, i32 5
  %84 = load i64, ptr %83, align 8
  %85 = icmp slt i64 %81, %84
  br i1 %85, label %87, label %86

86:
  store i32 8, ptr %9, align 4
  br label %101

87:
  %88 = load ptr, ptr %10, align 8
  %89 = load i64, ptr %15, align 8
  %90 = getelementptr inbounds float, ptr %88, i64 %89
  %91 = load float, ptr %90, align 4
  %92 = load ptr, ptr %10, align 8
  %93 = load i64, ptr %15, align 8
  %94 = getelementptr inbounds float, ptr %92, i64 %93
  %95 = load float, ptr %94, align 4
  %96 = load float, ptr %14, align 4
  %97 = call float @llvm.fma.f32(float %91, float %95, float %96)
  store float %97, ptr %14, align 4
  br label %98

98:
  %99 = load i64, ptr %15, align 8
  %100 = add nsw i64 %99, 1
  store i64 %100, ptr %15, align 8
  br label %80, !llvm.loop !17

101:
  %102 = load float, ptr %14, align 4
  %103 = load ptr, ptr %5, align 8
  %104 = getelementptr inbounds nuw %struct.Norm, ptr %103, i32 0, i32 5
  %105 = load i64, ptr %104, align 8
  %106 = sitofp i64 %105 to float
  %107 = fdiv float %102, %106
  %108 = load ptr, ptr %5, align 8
  %109 = getelementptr inbounds nuw %struct.Norm, ptr %108, i32 0, i32 3
  %110 = load float, ptr %109, align 8
  %111 = fadd float %107, %110
  %112 = call float @sqrtf(float noundef %111) #16
  %113 = fdiv float 1.000000e+00, %112
  store float %113, ptr %16, align 4
  store i64 0, ptr %17, align 8
  br label %114

114:
  %115 = load i64, ptr %17, align 8
  %116 = load i64, ptr %6, align 8
  %117 = icmp slt i64 %115, %116
  br i1 %117, label %119, label %118

118:
  store i32 11, ptr %9, align 4
  br label %141

119:
  %120 = load ptr, ptr %11, align 8
  %121 = load i64, ptr %17, align 8
  %122 = getelementptr inbounds float, ptr %120, i64 %121
  %123 = load ptr, ptr %10, align 8
  %124 = load i64, ptr %17, align 8
  %125 = getelementptr inbounds float, ptr %123, i64 %124
  %126 = call <16 x float> @load(ptr noundef %125, i32 noundef 0)
  %127 = load float, ptr %16, align 4
  %128 = insertelement <16 x float> poison, float %127, i64 0
  %129 = shufflevector <16 x float> %128, <16 x float> poison, <16 x i32> zeroinitializer
  %130 = fmul <16 x float> %126, %129
  %131 = load ptr, ptr %5, align 8
  %132 = getelementptr inbounds nuw %struct.Norm, ptr %131, i32 0, i32 1
  %133 = load ptr, ptr %132, align 8
  %134 = load i64, ptr %17, align 8
  %135 = getelementptr inbounds float, ptr %133, i64 %134
  %136 = call <16 x float> @load(ptr noundef %135, i32 noundef 0)
  %137 = fmul <16 x float> %130, %136
  call void @store(ptr noundef %122, <16 x float> noundef %137)
  br label %138

138:
  %139 = load i64, ptr %17, align 8
  %140 = add nsw i64 %139, 16
  store i64 %140, ptr %17, align 8
  br label %114, !llvm.loop !18

141:
  %142 = load i64, ptr %6, align 8
  store i64 %142, ptr %18, align 8
  br label %143

143:
  %144 = load i64, ptr %18, align 8
  %145 = load ptr, ptr %5, align 8
  %146 = getelementptr inbounds nuw %struct.Norm, ptr %145, i32 0, i32 5
  %147 = load i64, ptr %146, align 8
  %148 = icmp slt i64 %144, %147
  br i1 %148, label %150, label %149

149:
  store i32 14, ptr %9, align 4
  br label %170

150:
  %151 = load ptr, ptr %10, align 8
  %152 = load i64, ptr %18, align 8
  %153 = getelementptr inbounds float, ptr %151, i64 %152
  %154 = load float, ptr %153, align 4
  %155 = load float, ptr %16, align 4
  %156 = fmul float %154, %155
  %157 = load ptr, ptr %5, align 8
  %158 = getelementptr inbounds nuw %struct.Norm, ptr %157, i32 0, i32 1
  %159 = load ptr, ptr %158, align 8
  %160 = load i64, ptr %18, align 8
  %161 = getelementptr inbounds float, ptr %159, i64 %160
  %162 = load float, ptr %161, align 4
  %163 = fmul float %156, %162
  %164 = load ptr, ptr %11, align 8
  %165 = load i64, ptr %18, align 8
  %166 = getelementptr inbounds float, ptr %164, i64 %165
  store float %163, ptr %166, align 4
  br label %167

167:
  %168 = load i64, ptr %18, align 8
  %169 = add nsw i64 %168, 1
  store i64 %169, ptr %18, align 8
  br label %143, !llvm.loop !19

170:
  br label %171

171:
  %172 = load i64, ptr %8, align 8
  %173 = add nsw i64 %172, 1
  store i64 %173, ptr %8, align 8
  br label %33, !llvm.loop !20

174:
  ret void
}

define ptr @failfast_product_float32(ptr noundef %0) #0 {
  %2 = alloca ptr, align 8
  store ptr %0, ptr %2, align 8
  %3 = load ptr, ptr %2, align 8
  %4 = call ptr @product(ptr noundef %3, ptr noundef @outputs_float32)
  ret ptr %4
}

define internal ptr @product(ptr noundef %0, ptr noundef %1) #1 {
  %3 = alloca ptr, align 8
  %4 = alloca ptr, align 8
  %5 = alloca ptr, align 8
  %6 = alloca ptr, align 8
  %7 = alloca ptr, align 8
  %8 = alloca %struct.Product, align 8
  store ptr %0, ptr %4, align 8
  store ptr %1, ptr %5, align 8
  %9 = load ptr, ptr %4, align 8
  %10 = call i32 @is_registration(ptr noundef %9)
  %11 = icmp ne i32 %10, 0
  br i1 %11, label %12, label %13

12:
  store ptr null, ptr %3, align 8
  br label %56

13:
  %14 = load ptr, ptr %4, align 8
  %15 = call ptr @argument(ptr noundef %14, i64 noundef 0)
  store ptr %15, ptr %6, align 8
  %16 = load ptr, ptr %4, align 8
  %17 = call ptr @argument(ptr noundef %16, i64 noundef 1)
  store ptr %17, ptr %7, align 8
  %18 = getelementptr inbounds nuw %struct.Product, ptr %8, i32 0, i32 0
  %19 = load ptr, ptr %6, align 8
  %20 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %19, i32 0, i32 3
  %21 = load ptr, ptr %20, align 8
  store ptr %21, ptr %18, align 8
  %22 = getelementptr inbounds nuw %struct.Product, ptr %8, i32 0, i32 1
  %23 = load ptr, ptr %7, align 8
  %24 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %23, i32 0, i32 3
  %25 = load ptr, ptr %24, align 8
  store ptr %25, ptr %22, align 8
  %26 = getelementptr inbounds nuw %struct.Product, ptr %8, i32 0, i32 2
  %27 = load ptr, ptr %4, align 8
  %28 = call ptr @result(ptr noundef %27, i64 noundef 0)
  %29 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %28, i32 0, i32 3
  %30 = load ptr, ptr %29, align 8
  store ptr %30, ptr %26, align 8
  %31 = getelementptr inbounds nuw %struct.Product, ptr %8, i32 0, i32 3
  %32 = load ptr, ptr %6, align 8
  %33 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %32, i32 0, i32 5
  %34 = load ptr, ptr %33, align 8
  %35 = getelementptr inbounds i64, ptr %34, i64 0
  %36 = load i64, ptr %35, align 8
  store i64 %36, ptr %31, align 8
  %37 = getelementptr inbounds nuw %struct.Product, ptr %8, i32 0, i32 4
  %38 = load ptr, ptr %6, align 8
  %39 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %38, i32 0, i32 5
  %40 = load ptr, ptr %39, align 8
  %41 = getelementptr inbounds i64, ptr %40, i64 1
  %42 = load i64, ptr %41, align 8
  store i64 %42, ptr %37, align 8
  %43 = getelementptr inbounds nuw %struct.Product, ptr %8, i32 0, i32 5
  %44 = load ptr, ptr %7, align 8
  %45 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %44, i32 0, i32 5
  %46 = load ptr, ptr %45, align 8
  %47 = getelementptr inbounds i64, ptr %46, i64 0
  %48 = load i64, ptr %47, align 8
  store i64 %48, ptr %43, align 8
  %49 = load ptr, ptr %4, align 8
  %50 = getelementptr inbounds nuw %struct.Product, ptr %8, i32 0, i32 5
  %51 = load i64, ptr %50, align 8
  %52 = add nsw i64 %51, 48
  %53 = sub nsw i64 %52, 1
  %54 = sdiv i64 %53, 48
  %55 = load ptr, ptr %5, align 8
  call void @parallel_for(ptr noundef %49, i64 noundef %54, ptr noundef %55, ptr noundef %8)
  store ptr null, ptr %3, align 8
  br label %56

56:
  %57 = load ptr, ptr %3, align 8
  ret ptr %57
}

define internal void @outputs_float32(i64 noundef %0, ptr noundef %1) #5 {
  %3 = alloca i64, align 8
  %4 = alloca ptr, align 8
  store i64 %0, ptr %3, align 8
  store ptr %1, ptr %4, align 8
  %5 = load i64, ptr %3, align 8
  %6 = load ptr, ptr %4, align 8
  call void @outputs_of(i64 noundef %5, ptr noundef %6, i32 noundef 0)
  ret void
}

define ptr @failfast_product_bfloat16(ptr noundef %0) #0 {
  %2 = alloca ptr, align 8
  store ptr %0, ptr %2, align 8
  %3 = load ptr, ptr %2, align 8
  %4 = call ptr @product(ptr noundef %3, ptr noundef @outputs_bfloat16)
  ret ptr %4
}

define internal void @outputs_bfloat16(i64 noundef %0, ptr noundef %1) #5 {
  %3 = alloca i64, align 8
  %4 = alloca ptr, align 8
  store i64 %0, ptr %3, align 8
  store ptr %1, ptr %4, align 8
  %5 = load i64, ptr %3, align 8
  %6 = load ptr, ptr %4, align 8
  call void @outputs_of(i64 noundef %5, ptr noundef %6, i32 noundef 1)
  ret void
}

define ptr @failfast_product_float16(ptr noundef %0) #0 {
  %2 = alloca ptr, align 8
  store ptr %0, ptr %2, align 8
  %3 = load ptr, ptr %2, align 8
  %4 = call ptr @product(ptr noundef %3, ptr noundef @outputs_float16)
  ret ptr %4
}

define internal void @outputs_float16(i64 noundef %0, ptr noundef %1) #5 {
  %3 = alloca i64, align 8
  %4 = alloca ptr, align 8
  store i64 %0, ptr %3, align 8
  store ptr %1, ptr %4, align 8
  %5 = load i64, ptr %3, align 8
  %6 = load ptr, ptr %4, align 8
  call void @outputs_of(i64 noundef %5, ptr noundef %6, i32 noundef 2)
  ret void
}

define ptr @failfast_attention_float32(ptr noundef %0) #0 {
  %2 = alloca ptr, align 8
  store ptr %0, ptr %2, align 8
  %3 = load ptr, ptr %2, align 8
  %4 = call ptr @attention(ptr noundef %3, ptr noundef @attend_float32)
  ret ptr %4
}

define internal ptr @attention(ptr noundef %0, ptr noundef %1) #1 {
  %3 = alloca ptr, align 8
  %4 = alloca ptr, align 8
  %5 = alloca ptr, align 8
  %6 = alloca ptr, align 8
  %7 = alloca ptr, align 8
  %8 = alloca ptr, align 8
  %9 = alloca i64, align 8
  %10 = alloca i64, align 8
  %11 = alloca i64, align 8
  %12 = alloca i64, align 8
  %13 = alloca i64, align 8
  %14 = alloca i64, align 8
  %15 = alloca i64, align 8
  %16 = alloca %struct.Attention, align 8
  store ptr %0, ptr %4, align 8
  store ptr %1, ptr %5, align 8
  %17 = load ptr, ptr %4, align 8
  %18 = call i32 @is_registration(ptr noundef %17)
  %19 = icmp ne i32 %18, 0
  br i1 %19, label %20, label %21

20:
  store ptr null, ptr %3, align 8
  br label %160

21:
  %22 = load ptr, ptr %4, align 8
  %23 = call ptr @argument(ptr noundef %22, i64 noundef 0)
  store ptr %23, ptr %6, align 8
  %24 = load ptr, ptr %4, align 8
  %25 = call ptr @argument(ptr noundef %24, i64 noundef 1)
  store ptr %25, ptr %7, align 8
  %26 = load ptr, ptr %4, align 8
  %27 = call ptr @result(ptr noundef %26, i64 noundef 1)
  store ptr %27, ptr %8, align 8
  %28 = load ptr, ptr %4, align 8
  %29 = call ptr @argument(ptr noundef %28, i64 noundef 5)
  %30 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %29, i32 0, i32 3
  %31 = load ptr, ptr %30, align 8
  %32 = load i32, ptr %31, align 4
  %33 = sext i32 %32 to i64
  store i64 %33, ptr %9, align 8
  %34 = load ptr, ptr %4, align 8
  %35 = call ptr @argument(ptr noundef %34, i64 noundef 6)
  %36 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %35, i32 0, i32 3
  %37 = load ptr, ptr %36, align 8
  %38 = load i32, ptr %37, align 4
  %39 = sext i32 %38 to i64
  store i64 %39, ptr %10, align 8
  %40 = load ptr, ptr %8, align 8
  %41 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %40, i32 0, i32 5
  %42 = load ptr, ptr %41, align 8
  %43 = getelementptr inbounds i64, ptr %42, i64 1
  %44 = load i64, ptr %43, align 8
  store i64 %44, ptr %11, align 8
  %45 = load i64, ptr %11, align 8
  %46 = load ptr, ptr %7, align 8
  %47 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %46, i32 0, i32 5
  %48 = load ptr, ptr %47, align 8
  %49 = getelementptr inbounds i64, ptr %48, i64 0
  %50 = load i64, ptr %49, align 8
  %51 = sdiv i64 %45, %50
  store i64 %51, ptr %12, align 8
  %52 = load ptr, ptr %6, align 8
  %53 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %52, i32 0, i32 5
  %54 = load ptr, ptr %53, align 8
  %55 = getelementptr inbounds i64, ptr %54, i64 2
  %56 = load i64, ptr %55, align 8
  %57 = load i64, ptr %12, align 8
  %58 = sdiv i64 %56, %57
  store i64 %58, ptr %13, align 8
  %59 = load ptr, ptr %6, align 8
  %60 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %59, i32 0, i32 5
  %61 = load ptr, ptr %60, align 8
  %62 = getelementptr inbounds i64, ptr %61, i64 1
  %63 = load i64, ptr %62, align 8
  %64 = load i64, ptr %13, align 8
  %65 = mul nsw i64 %63, %64
  store i64 %65, ptr %14, align 8
  %66 = load i64, ptr %14, align 8
  %67 = icmp sgt i64 %66, 96
  %68 = zext i1 %67 to i64
  %69 = select i1 %67, i32 96, i32 8
  %70 = sext i32 %69 to i64
  store i64 %70, ptr %15, align 8
  %71 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 0
  %72 = load ptr, ptr %6, align 8
  %73 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %72, i32 0, i32 3
  %74 = load ptr, ptr %73, align 8
  store ptr %74, ptr %71, align 8
  %75 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 1
  %76 = load ptr, ptr %7, align 8
  %77 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %76, i32 0, i32 3
  %78 = load ptr, ptr %77, align 8
  store ptr %78, ptr %75, align 8
  %79 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 2
  %80 = load ptr, ptr %4, align 8
  %81 = call ptr @argument(ptr noundef %80, i64 noundef 2)
  %82 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %81, i32 0, i32 3
  %83 = load ptr, ptr %82, align 8
  store ptr %83, ptr %79, align 8
  %84 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 3
  %85 = load ptr, ptr %4, align 8
  %86 = call ptr @argument(ptr noundef %85, i64 noundef 3)
  %87 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %86, i32 0, i32 3
  %88 = load ptr, ptr %87, align 8
  store ptr %88, ptr %84, align 8
  %89 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 4
  %90 = load ptr, ptr %4, align 8
  %91 = call ptr @argument(ptr noundef %90, i64 noundef 4)
  %92 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %91, i32 0, i32 3
  %93 = load ptr, ptr %92, align 8
  store ptr %93, ptr %89, align 8
  %94 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 5
  %95 = load ptr, ptr %8, align 8
  %96 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %95, i32 0, i32 3
  %97 = load ptr, ptr %96, align 8
  store ptr %97, ptr %94, align 8
  %98 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 6
  %99 = load i64, ptr %11, align 8
  store i64 %99, ptr %98, align 8
  %100 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 7
  %101 = load i64, ptr %12, align 8
  store i64 %101, ptr %100, align 8
  %102 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 8
  %103 = load ptr, ptr %7, align 8
  %104 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %103, i32 0, i32 5
  %105 = load ptr, ptr %104, align 8
  %106 = getelementptr inbounds i64, ptr %105, i64 1
  %107 = load i64, ptr %106, align 8
  store i64 %107, ptr %102, align 8
  %108 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 9
  %109 = load i64, ptr %10, align 8
  store i64 %109, ptr %108, align 8
  %110 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 10
  %111 = load i64, ptr %13, align 8
  store i64 %111, ptr %110, align 8
  %112 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 11
  %113 = load i64, ptr %14, align 8
  store i64 %113, ptr %112, align 8
  %114 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 12
  %115 = load ptr, ptr %7, align 8
  %116 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %115, i32 0, i32 5
  %117 = load ptr, ptr %116, align 8
  %118 = getelementptr inbounds i64, ptr %117, i64 2
  %119 = load i64, ptr %118, align 8
  store i64 %119, ptr %114, align 8
  %120 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 13
  %121 = load i64, ptr %9, align 8
  store i64 %121, ptr %120, align 8
  %122 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 14
  %123 = load ptr, ptr %8, align 8
  %124 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %123, i32 0, i32 5
  %125 = load ptr, ptr %124, align 8
  %126 = getelementptr inbounds i64, ptr %125, i64 0
  %127 = load i64, ptr %126, align 8
  %128 = icmp sgt i64 %127, 1
  br i1 %128, label %129, label %134

129:
  %130 = load i64, ptr %9, align 8
  %131 = add nsw i64 %130, 256
  %132 = sub nsw i64 %131, 1
  %133 = sdiv i64 %132, 256
  br label %135

134:
  br label %135

135:
  %136 = phi i64 [ %133, %129 ], [ 1, %134 ]
  store i64 %136, ptr %122, align 8
  %137 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 15
  %138 = load i64, ptr %15, align 8
  store i64 %138, ptr %137, align 8
  %139 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 16
  %140 = load i64, ptr %14, align 8
  %141 = load i64, ptr %15, align 8
  %142 = add nsw i64 %140, %141
  %143 = sub nsw i64 %142, 1
  %144 = load i64, ptr %15, align 8
  %145 = sdiv i64 %143, %144
  store i64 %145, ptr %139, align 8
  %146 = load ptr, ptr %4, align 8
  %147 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 6
  %148 = load i64, ptr %147, align 8
  %149 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 14
  %150 = load i64, ptr %149, align 8
  %151 = mul nsw i64 %148, %150
  %152 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 16
  %153 = load i64, ptr %152, align 8
  %154 = mul nsw i64 %151, %153
  %155 = load ptr, ptr %5, align 8
  call void @parallel_for(ptr noundef %146, i64 noundef %154, ptr noundef %155, ptr noundef %16)
  %156 = load ptr, ptr %4, align 8
  %157 = call ptr @result(ptr noundef %156, i64 noundef 0)
  %158 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %157, i32 0, i32 3
  %159 = load ptr, ptr %158, align 8
  call void @combine_splits(ptr noundef %16, ptr noundef %159)
  store ptr null, ptr %3, align 8
  br label %160

160:
  %161 = load ptr, ptr %3, align 8
  ret ptr %161
}

define internal void @attend_float32(i64 noundef %0, ptr noundef %1) #5 {
  %3 = alloca i64, align 8
  %4 = alloca ptr, align 8
  store i64 %0, ptr %3, align 8
  store ptr %1, ptr %4, align 8
  %5 = load i64, ptr %3, align 8
  %6 = load ptr, ptr %4, align 8
  call void @attend_block(i64 noundef %5, ptr noundef %6, i32 noundef 0)
  ret void
}

define ptr @failfast_attention_bfloat16(ptr noundef %0) #0 {
  %2 = alloca ptr, align 8
  store ptr %0, ptr %2, align 8
  %3 = load ptr, ptr %2, align 8
  %4 = call ptr @attention(ptr noundef %3, ptr noundef @attend_bfloat16)
  ret ptr %4
}

define internal void @attend_bfloat16(i64 noundef %0, ptr noundef %1) #5 {
  %3 = alloca i64, align 8
  %4 = alloca ptr, align 8
  store i64 %0, ptr %3, align 8
  store ptr %1, ptr %4, align 8
  %5 = load i64, ptr %3, align 8
  %6 = load ptr, ptr %4, align 8
  call void @attend_block(i64 noundef %5, ptr noundef %6, i32 noundef 1)
  ret void
}

define ptr @failfast_attention_float16(ptr noundef %0) #0 {
  %2 = alloca ptr, align 8
  store ptr %0, ptr %2, align 8
  %3 = load ptr, ptr %2, align 8
  %4 = call ptr @attention(ptr noundef %3, ptr noundef @attend_float16)
  ret ptr %4
}

define internal void @attend_float16(i64 noundef %0, ptr noundef %1) #5 {
  %3 = alloca i64, align 8
  %4 = alloca ptr, align 8
  store i64 %0, ptr %3, align 8
  store ptr %1, ptr %4, align 8
  %5 = load i64, ptr %3, align 8
  %6 = load ptr, ptr %4, align 8
  call void @attend_block(i64 noundef %5, ptr noundef %6, i32 noundef 2)
  ret void
}

define ptr @failfast_blocks_int8(ptr noundef %0) #0 {
  %2 = alloca ptr, align 8
  store ptr %0, ptr %2, align 8
  %3 = load ptr, ptr %2, align 8
  %4 = call ptr @block_product(ptr noundef %3, ptr noundef @blocks_int8, i32 noundef 1)
  ret ptr %4
}

define internal ptr @block_product(ptr noundef %0, ptr noundef %1, i32 noundef %2) #1 {
  %4 = alloca ptr, align 8
  %5 = alloca ptr, align 8
  %6 = alloca ptr, align 8
  %7 = alloca i32, align 4
  %8 = alloca ptr, align 8
  %9 = alloca ptr, align 8
  %10 = alloca i64, align 8
  %11 = alloca i64, align 8
  %12 = alloca i64, align 8
  %13 = alloca i64, align 8
  %14 = alloca i64, align 8
  %15 = alloca ptr, align 8
  %16 = alloca %struct.Blocks, align 8
  store ptr %0, ptr %5, align 8
  store ptr %1, ptr %6, align 8
  store i32 %2, ptr %7, align 4
  %17 = load ptr, ptr %5, align 8
  %18 = call i32 @is_registration(ptr noundef %17)
  %19 = icmp ne i32 %18, 0
  br i1 %19, label %20, label %21

20:
  store ptr null, ptr %4, align 8
  br label %136

21:
  %22 = load ptr, ptr %5, align 8
  %23 = call ptr @argument(ptr noundef %22, i64 noundef 0)
  store ptr %23, ptr %8, align 8
  %24 = load ptr, ptr %5, align 8
  %25 = call ptr @result(ptr noundef %24, i64 noundef 0)
  store ptr %25, ptr %9, align 8
  %26 = load ptr, ptr %8, align 8
  %27 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %26, i32 0, i32 5
  %28 = load ptr, ptr %27, align 8
  %29 = getelementptr inbounds i64, ptr %28, i64 0
  %30 = load i64, ptr %29, align 8
  store i64 %30, ptr %10, align 8
  %31 = load ptr, ptr %8, align 8
  %32 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %31, i32 0, i32 5
  %33 = load ptr, ptr %32, align 8
  %34 = getelementptr inbounds i64, ptr %33, i64 1
  %35 = load i64, ptr %34, align 8
  store i64 %35, ptr %11, align 8
  %36 = load i64, ptr %10, align 8
  %37 = load i64, ptr %11, align 8
  %38 = mul nsw i64 %36, %37
  %39 = sdiv i64 %38, 32
  store i64 %39, ptr %12, align 8
  %40 = load ptr, ptr %5, align 8
  %41 = call ptr @argument(ptr noundef %40, i64 noundef 1)
  %42 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %41, i32 0, i32 3
  %43 = load ptr, ptr %42, align 8
  %44 = load i32, ptr %43, align 4
  %45 = sext i32 %44 to i64
  store i64 %45, ptr %13, align 8
  %46 = load i64, ptr @outer, align 8
  %47 = icmp ne i64 %46, 0
  %48 = zext i1 %47 to i64
  %49 = select i1 %47, i32 3, i32 2
  %50 = call i64 @bytes_of(i32 noundef %49)
  store i64 %50, ptr %14, align 8
  %51 = load ptr, ptr %5, align 8
  %52 = call ptr @result(ptr noundef %51, i64 noundef 1)
  %53 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %52, i32 0, i32 3
  %54 = load ptr, ptr %53, align 8
  store ptr %54, ptr %15, align 8
  %55 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 0
  %56 = load ptr, ptr %8, align 8
  %57 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %56, i32 0, i32 3
  %58 = load ptr, ptr %57, align 8
  store ptr %58, ptr %55, align 8
  %59 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 1
  %60 = load ptr, ptr %15, align 8
  %61 = load i64, ptr %12, align 8
  %62 = mul nsw i64 %61, 20
  %63 = getelementptr inbounds i8, ptr %60, i64 %62
  store ptr %63, ptr %59, align 8
  %64 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 2
  %65 = load ptr, ptr %15, align 8
  store ptr %65, ptr %64, align 8
  %66 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 3
  %67 = load ptr, ptr %15, align 8
  %68 = load i64, ptr %12, align 8
  %69 = mul nsw i64 %68, 4
  %70 = getelementptr inbounds i8, ptr %67, i64 %69
  store ptr %70, ptr %66, align 8
  %71 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 4
  %72 = load ptr, ptr %15, align 8
  %73 = load i64, ptr %12, align 8
  %74 = mul nsw i64 %73, 12
  %75 = getelementptr inbounds i8, ptr %72, i64 %74
  store ptr %75, ptr %71, align 8
  %76 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 5
  %77 = load ptr, ptr %5, align 8
  %78 = call ptr @argument(ptr noundef %77, i64 noundef 2)
  %79 = load i64, ptr %13, align 8
  %80 = call ptr @of_layer(ptr noundef %78, i64 noundef %79, i64 noundef 1)
  store ptr %80, ptr %76, align 8
  %81 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 6
  %82 = load ptr, ptr %5, align 8
  %83 = call ptr @argument(ptr noundef %82, i64 noundef 3)
  %84 = load i64, ptr %13, align 8
  %85 = load i64, ptr %14, align 8
  %86 = call ptr @of_layer(ptr noundef %83, i64 noundef %84, i64 noundef %85)
  store ptr %86, ptr %81, align 8
  %87 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 7
  %88 = load ptr, ptr %5, align 8
  %89 = call ptr @argument(ptr noundef %88, i64 noundef 4)
  %90 = load i64, ptr %13, align 8
  %91 = load i64, ptr %14, align 8
  %92 = call ptr @of_layer(ptr noundef %89, i64 noundef %90, i64 noundef %91)
  store ptr %92, ptr %87, align 8
  %93 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 8
  %94 = load ptr, ptr %5, align 8
  %95 = call ptr @argument(ptr noundef %94, i64 noundef 5)
  %96 = load i64, ptr %13, align 8
  %97 = call i64 @bytes_of(i32 noundef 2)
  %98 = call ptr @of_layer(ptr noundef %95, i64 noundef %96, i64 noundef %97)
  store ptr %98, ptr %93, align 8
  %99 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 9
  %100 = load ptr, ptr %5, align 8
  %101 = call ptr @argument(ptr noundef %100, i64 noundef 6)
  %102 = load i64, ptr %13, align 8
  %103 = call i64 @bytes_of(i32 noundef 2)
  %104 = call ptr @of_layer(ptr noundef %101, i64 noundef %102, i64 noundef %103)
  store ptr %104, ptr %99, align 8
  %105 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 10
  %106 = load ptr, ptr %9, align 8
  %107 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %106, i32 0, i32 3
  %108 = load ptr, ptr %107, align 8
  store ptr %108, ptr %105, align 8
  %109 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 11
  %110 = load i64, ptr %10, align 8
  store i64 %110, ptr %109, align 8
  %111 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 12
  %112 = load i64, ptr %11, align 8
  store i64 %112, ptr %111, align 8
  %113 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 13
  %114 = load ptr, ptr %9, align 8
  %115 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %114, i32 0, i32 5
  %116 = load ptr, ptr %115, align 8
  %117 = getelementptr inbounds i64, ptr %116, i64 1
  %118 = load i64, ptr %117, align 8
  store i64 %118, ptr %113, align 8
  %119 = load i32, ptr %7, align 4
  %120 = icmp ne i32 %119, 0
  br i1 %120, label %121, label %127

121:
  %122 = load ptr, ptr %5, align 8
  %123 = load i64, ptr %10, align 8
  %124 = add nsw i64 %123, 2
  %125 = sub nsw i64 %124, 1
  %126 = sdiv i64 %125, 2
  call void @parallel_for(ptr noundef %122, i64 noundef %126, ptr noundef @round_rows, ptr noundef %16)
  br label %127

127:
  %128 = load ptr, ptr %5, align 8
  %129 = getelementptr inbounds nuw %struct.Blocks, ptr %16, i32 0, i32 13
  %130 = load i64, ptr %129, align 8
  %131 = sdiv i64 %130, 16
  %132 = add nsw i64 %131, 3
  %133 = sub nsw i64 %132, 1
  %134 = sdiv i64 %133, 3
  %135 = load ptr, ptr %6, align 8
  call void @parallel_for(ptr noundef %128, i64 noundef %134, ptr noundef %135, ptr noundef %16)
  store ptr null, ptr %4, align 8
  br label %136

136:
  %137 = load ptr, ptr %4, align 8
  ret ptr %137
}

define internal void @blocks_int8(i64 noundef %0, ptr noundef %1) #5 {
  %3 = alloca i64, align 8
  %4 = alloca ptr, align 8
  store i64 %0, ptr %3, align 8
  store ptr %1, ptr %4, align 8
  %5 = load i64, ptr %3, align 8
  %6 = load ptr, ptr %4, align 8
  call void @block_tiles(i64 noundef %5, ptr noundef %6, i32 noundef 1)
  ret void
}

define ptr @failfast_blocks_float32(ptr noundef %0) #0 {
  %2 = alloca ptr, align 8
  store ptr %0, ptr %2, align 8
  %3 = load ptr, ptr %2, align 8
  %4 = call ptr @block_product(ptr noundef %3, ptr noundef @blocks_float32, i32 noundef 0)
  ret ptr %4
}

define internal void @blocks_float32(i64 noundef %0, ptr noundef %1) #5 {
  %3 = alloca i64, align 8
  %4 = alloca ptr, align 8
  store i64 %0, ptr %3, align 8
  store ptr %1, ptr %4, align 8
  %5 = load i64, ptr %3, align 8
  %6 = load ptr, ptr %4, align 8
  call void @block_tiles(i64 noundef %5, ptr noundef %6, i32 noundef 0)
  ret void
}

define internal i32 @failed(ptr noundef %0, ptr noundef %1) #1 {
  %3 = alloca i32, align 4
  %4 = alloca ptr, align 8
  %5 = alloca ptr, align 8
  %6 = alloca %struct.XLA_FFI_Error_Destroy_Args, align 8
  store ptr %0, ptr %4, align 8
  store ptr %1, ptr %5, align 8
  %7 = load ptr, ptr %5, align 8
  %8 = icmp ne ptr %7, null
  br i1 %8, label %10, label %9

9:
  store i32 0, ptr %3, align 4
  br label %20

10:
  %11 = getelementptr inbounds nuw %struct.XLA_FFI_Error_Destroy_Args, ptr %6, i32 0, i32 0
  store i64 24, ptr %11, align 8
  %12 = getelementptr inbounds nuw %struct.XLA_FFI_Error_Destroy_Args, ptr %6, i32 0, i32 1
  store ptr null, ptr %12, align 8
  %13 = getelementptr inbounds nuw %struct.XLA_FFI_Error_Destroy_Args, ptr %6, i32 0, i32 2
  %14 = load ptr, ptr %5, align 8
  store ptr %14, ptr %13, align 8
  %15 = load ptr, ptr %4, align 8
  %16 = getelementptr inbounds nuw %struct.XLA_FFI_CallFrame, ptr %15, i32 0, i32 2
  %17 = load ptr, ptr %16, align 8
  %18 = getelementptr inbounds nuw %struct.XLA_FFI_Api, ptr %17, i32 0, i32 6
  %19 = load ptr, ptr %18, align 8
  call void %19(ptr noundef %6)
  store i32 1, ptr %3, align 4
  br label %20

20:
  %21 = load i32, ptr %3, align 4
  ret i32 %21
}

declare noalias ptr @malloc(i64 noundef) #6

define internal i64 @min_of(i64 noundef %0, i64 noundef %1) #1 {
  %3 = alloca i64, align 8
  %4 = alloca i64, align 8
  store i64 %0, ptr %3, align 8
  store i64 %1, ptr %4, align 8
  %5 = load i64, ptr %3, align 8
  %6 = load i64, ptr %4, align 8
  %7 = icmp slt i64 %5, %6
  br i1 %7, label %8, label %10

8:
  %9 = load i64, ptr %3, align 8
  br label %12

10:
  %11 = load i64, ptr %4, align 8
  br label %12

12:
  %13 = phi i64 [ %9, %8 ], [ %11, %10 ]
  ret i64 %13
}

declare void @llvm.memcpy.p0.p0.i64(ptr noalias writeonly captures(none), ptr noalias readonly captures(none), i64, i1 immarg) #7

define internal void @run_helper(ptr noundef %0) #5 {
  %2 = alloca ptr, align 8
  store ptr %0, ptr %2, align 8
  %3 = load ptr, ptr %2, align 8
  call void @take_pieces(ptr noundef %3)
  %4 = load ptr, ptr %2, align 8
  call void @release(ptr noundef %4)
  ret void
}

define internal void @release(ptr noundef %0) #1 {
  %2 = alloca ptr, align 8
  %3 = alloca i64, align 8
  %4 = alloca i64, align 8
  store ptr %0, ptr %2, align 8
  %5 = load ptr, ptr %2, align 8
  %6 = getelementptr inbounds nuw %struct.Job, ptr %5, i32 0, i32 2
  store i64 1, ptr %3, align 8
  %7 = load i64, ptr %3, align 8
  %8 = atomicrmw sub ptr %6, i64 %7 acq_rel, align 8
  store i64 %8, ptr %4, align 8
  %9 = load i64, ptr %4, align 8
  %10 = icmp eq i64 %9, 1
  br i1 %10, label %11, label %13

11:
  %12 = load ptr, ptr %2, align 8
  call void @free(ptr noundef %12) #16
  br label %13

13:
  ret void
}

define internal void @take_pieces(ptr noundef %0) #1 {
  %2 = alloca ptr, align 8
  %3 = alloca i64, align 8
  %4 = alloca i64, align 8
  %5 = alloca i64, align 8
  %6 = alloca i64, align 8
  %7 = alloca i64, align 8
  store ptr %0, ptr %2, align 8
  br label %8

8:
  %9 = load ptr, ptr %2, align 8
  %10 = getelementptr inbounds nuw %struct.Job, ptr %9, i32 0, i32 0
  store i64 1, ptr %4, align 8
  %11 = load i64, ptr %4, align 8
  %12 = atomicrmw add ptr %10, i64 %11 monotonic, align 8
  store i64 %12, ptr %5, align 8
  %13 = load i64, ptr %5, align 8
  store i64 %13, ptr %3, align 8
  %14 = load ptr, ptr %2, align 8
  %15 = getelementptr inbounds nuw %struct.Job, ptr %14, i32 0, i32 3
  %16 = load i64, ptr %15, align 8
  %17 = icmp slt i64 %13, %16
  br i1 %17, label %18, label %31

18:
  %19 = load ptr, ptr %2, align 8
  %20 = getelementptr inbounds nuw %struct.Job, ptr %19, i32 0, i32 4
  %21 = load ptr, ptr %20, align 8
  %22 = load i64, ptr %3, align 8
  %23 = load ptr, ptr %2, align 8
  %24 = getelementptr inbounds nuw %struct.Job, ptr %23, i32 0, i32 5
  %25 = load ptr, ptr %24, align 8
  call void %21(i64 noundef %22, ptr noundef %25)
  %26 = load ptr, ptr %2, align 8
  %27 = getelementptr inbounds nuw %struct.Job, ptr %26, i32 0, i32 1
  store i64 1, ptr %6, align 8
  %28 = load i64, ptr %6, align 8
  %29 = atomicrmw add ptr %27, i64 %28 release, align 8
  store i64 %29, ptr %7, align 8
  %30 = load i64, ptr %7, align 8
  br label %8, !llvm.loop !21

31:
  ret void
}

declare i32 @sched_yield() #8

declare void @free(ptr noundef) #9

declare ptr @llvm.stacksave.p0() #10

define internal i64 @max_of(i64 noundef %0, i64 noundef %1) #1 {
  %3 = alloca i64, align 8
  %4 = alloca i64, align 8
  store i64 %0, ptr %3, align 8
  store i64 %1, ptr %4, align 8
  %5 = load i64, ptr %3, align 8
  %6 = load i64, ptr %4, align 8
  %7 = icmp sgt i64 %5, %6
  br i1 %7, label %8, label %10

8:
  %9 = load i64, ptr %3, align 8
  br label %12

10:
  %11 = load i64, ptr %4, align 8
  br label %12

12:
  %13 = phi i64 [ %9, %8 ], [ %11, %10 ]
  ret i64 %13
}

define internal void @rotate_head(ptr noundef %0, ptr noundef %1, ptr noundef %2, ptr noundef %3) #11 {
  %5 = alloca ptr, align 8
  %6 = alloca ptr, align 8
  %7 = alloca ptr, align 8
  %8 = alloca ptr, align 8
  %9 = alloca i64, align 8
  %10 = alloca i64, align 8
  %11 = alloca <16 x float>, align 64
  %12 = alloca <16 x float>, align 64
  %13 = alloca <16 x float>, align 64
  %14 = alloca <16 x float>, align 64
  store ptr %0, ptr %5, align 8
  store ptr %1, ptr %6, align 8
  store ptr %2, ptr %7, align 8
  store ptr %3, ptr %8, align 8
  store i64 0, ptr %9, align 8
  %15 = load i64, ptr @head_dim, align 8
  %16 = sdiv i64 %15, 2
  store i64 %16, ptr %10, align 8
  br label %17

17:
  %18 = load i64, ptr %9, align 8
  %19 = load i64, ptr %10, align 8
  %20 = icmp slt i64 %18, %19
  br i1 %20, label %22, label %21

21:
  br label %66

22:
  %23 = load ptr, ptr %5, align 8
  %24 = load i64, ptr %9, align 8
  %25 = getelementptr inbounds float, ptr %23, i64 %24
  %26 = call <16 x float> @load(ptr noundef %25, i32 noundef 0)
  store <16 x float> %26, ptr %11, align 64
  %27 = load ptr, ptr %5, align 8
  %28 = load i64, ptr %10, align 8
  %29 = getelementptr inbounds float, ptr %27, i64 %28
  %30 = load i64, ptr %9, align 8
  %31 = getelementptr inbounds float, ptr %29, i64 %30
  %32 = call <16 x float> @load(ptr noundef %31, i32 noundef 0)
  store <16 x float> %32, ptr %12, align 64
  %33 = load ptr, ptr %6, align 8
  %34 = load i64, ptr %9, align 8
  %35 = getelementptr inbounds float, ptr %33, i64 %34
  %36 = call <16 x float> @load(ptr noundef %35, i32 noundef 0)
  store <16 x float> %36, ptr %13, align 64
  %37 = load ptr, ptr %7, align 8
  %38 = load i64, ptr %9, align 8
  %39 = getelementptr inbounds float, ptr %37, i64 %38
  %40 = call <16 x float> @load(ptr noundef %39, i32 noundef 0)
  store <16 x float> %40, ptr %14, align 64
  %41 = load ptr, ptr %8, align 8
  %42 = load i64, ptr %9, align 8
  %43 = getelementptr inbounds float, ptr %41, i64 %42
  %44 = load <16 x float>, ptr %11, align 64
  %45 = load <16 x float>, ptr %13, align 64
  %46 = fmul <16 x float> %44, %45
  %47 = load <16 x float>, ptr %12, align 64
  %48 = load <16 x float>, ptr %14, align 64
  %49 = fmul <16 x float> %47, %48
  %50 = fsub <16 x float> %46, %49
  call void @store(ptr noundef %43, <16 x float> noundef %50)
  %51 = load ptr, ptr %8, align 8
  %52 = load i64, ptr %10, align 8
  %53 = getelementptr inbounds float, ptr %51, i64 %52
  %54 = load i64, ptr %9, align 8
  %55 = getelementptr inbounds float, ptr %53, i64 %54
  %56 = load <16 x float>, ptr %12, align 64
  %57 = load <16 x float>, ptr %13, align 64
  %58 = fmul <16 x float> %56, %57
  %59 = load <16 x float>, ptr %11, align 64
  %60 = load <16 x float>, ptr %14, align 64
  %61 = fmul <16 x float> %59, %60
  %62 = fadd <16 x float> %58, %61
  call void @store(ptr noundef %55, <16 x float> noundef %62)
  br label %63

63:
  %64 = load i64, ptr %9, align 8
  %65 = add nsw i64 %64, 16
  store i64 %65, ptr %9, align 8
  br label %17, !llvm.loop !22

66:
  ret void
}

define internal <16 x float> @load(ptr noundef %0, i32 noundef %1) #11 {
  %3 = alloca <16 x float>, align 64
  %4 = alloca ptr, align 8
  %5 = alloca i32, align 4
  %6 = alloca <16 x i32>, align 64
  store ptr %0, ptr %4, align 8
  store i32 %1, ptr %5, align 4
  %7 = load i32, ptr %5, align 4
  switch i32 %7, label %23 [
    i32 1, label %8
    i32 2, label %15
    i32 3, label %19
  ]

8:
  %9 = load ptr, ptr %4, align 8
  %10 = load <16 x i16>, ptr %9, align 2
  %11 = zext <16 x i16> %10 to <16 x i32>
  %12 = shl <16 x i32> %11, splat (i32 16)
  store <16 x i32> %12, ptr %6, align 64
  %13 = load <16 x i32>, ptr %6, align 64
  %14 = bitcast <16 x i32> %13 to <16 x float>
  store <16 x float> %14, ptr %3, align 64
  br label %26

15:
  %16 = load ptr, ptr %4, align 8
  %17 = load <16 x half>, ptr %16, align 2
  %18 = fpext <16 x half> %17 to <16 x float>
  store <16 x float> %18, ptr %3, align 64
  br label %26

19:
  %20 = load ptr, ptr %4, align 8
  %21 = load <16 x i8>, ptr %20, align 1
  %22 = sitofp <16 x i8> %21 to <16 x float>
  store <16 x float> %22, ptr %3, align 64
  br label %26

23:
  %24 = load ptr, ptr %4, align 8
  %25 = load <16 x float>, ptr %24, align 4
  store <16 x float> %25, ptr %3, align 64
  br label %26

26:
  %27 = load <16 x float>, ptr %3, align 64
  ret <16 x float> %27
}

define internal void @store(ptr noundef %0, <16 x float> noundef %1) #11 {
  %3 = alloca ptr, align 8
  %4 = alloca <16 x float>, align 64
  store ptr %0, ptr %3, align 8
  store <16 x float> %1, ptr %4, align 64
  %5 = load <16 x float>, ptr %4, align 64
  %6 = load ptr, ptr %3, align 8
  store <16 x float> %5, ptr %6, align 4
  ret void
}

declare void @llvm.stackrestore.p0(ptr) #10

define internal <16 x float> @fma_(<16 x float> noundef %0, <16 x float> noundef %1, <16 x float> noundef %2) #11 {
  %4 = alloca <16 x float>, align 64
  %5 = alloca <16 x float>, align 64
  %6 = alloca <16 x float>, align 64
  store <16 x float> %0, ptr %4, align 64
  store <16 x float> %1, ptr %5, align 64
  store <16 x float> %2, ptr %6, align 64
  %7 = load <16 x float>, ptr %4, align 64
  %8 = load <16 x float>, ptr %5, align 64
  %9 = load <16 x float>, ptr %6, align 64
  %10 = call <16 x float> @llvm.fma.v16f32(<16 x float> %7, <16 x float> %8, <16 x float> %9)
  ret <16 x float> %10
}

define internal float @sum(<16 x float> noundef %0) #11 {
  %2 = alloca <16 x float>, align 64
  store <16 x float> %0, ptr %2, align 64
  call void @sums(ptr noundef %2, i32 noundef 1)
  %3 = load <16 x float>, ptr %2, align 64
  %4 = extractelement <16 x float> %3, i32 0
  ret float %4
}

declare float @llvm.fma.f32(float, float, float) #12

declare float @sqrtf(float noundef) #9

declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>) #12

define internal void @sums(ptr noundef %0, i32 noundef %1) #11 {
  %3 = alloca ptr, align 8
  %4 = alloca i32, align 4
  %5 = alloca i32, align 4
  %6 = alloca i32, align 4
  %7 = alloca i32, align 4
  %8 = alloca i32, align 4
  %9 = alloca i32, align 4
  %10 = alloca <16 x float>, align 64
  %11 = alloca <16 x float>, align 64
  store ptr %0, ptr %3, align 8
  store i32 %1, ptr %4, align 4
  store i32 0, ptr %5, align 4
  br label %12

12:
  %13 = load i32, ptr %5, align 4
  %14 = load i32, ptr %4, align 4
  %15 = icmp slt i32 %13, %14
  br i1 %15, label %17, label %16

16:
  store i32 2, ptr %6, align 4
  br label %103

17:
  %18 = load i32, ptr %4, align 4
  %19 = load i32, ptr %5, align 4
  %20 = sub nsw i32 %18, %19
  %21 = icmp slt i32 %20, 16
  br i1 %21, label %22, label %26

22:
  %23 = load i32, ptr %4, align 4
  %24 = load i32, ptr %5, align 4
  %25 = sub nsw i32 %23, %24
  br label %27

26:
  br label %27

27:
  %28 = phi i32 [ %25, %22 ], [ 16, %26 ]
  store i32 %28, ptr %7, align 4
  store i32 16, ptr %8, align 4
  br label %29

29:
  %30 = load i32, ptr %8, align 4
  %31 = icmp sgt i32 %30, 1
  br i1 %31, label %33, label %32

32:
  store i32 5, ptr %6, align 4
  br label %89

33:
  store i32 0, ptr %9, align 4
  br label %34

34:
  %35 = load i32, ptr %9, align 4
  %36 = load i32, ptr %7, align 4
  %37 = add nsw i32 %36, 1
  %38 = sdiv i32 %37, 2
  %39 = icmp slt i32 %35, %38
  br i1 %39, label %41, label %40

40:
  store i32 8, ptr %6, align 4
  br label %82

41:
  %42 = load ptr, ptr %3, align 8
  %43 = load i32, ptr %5, align 4
  %44 = load i32, ptr %9, align 4
  %45 = mul nsw i32 2, %44
  %46 = add nsw i32 %43, %45
  %47 = sext i32 %46 to i64
  %48 = getelementptr inbounds <16 x float>, ptr %42, i64 %47
  %49 = load <16 x float>, ptr %48, align 64
  store <16 x float> %49, ptr %10, align 64
  %50 = load i32, ptr %9, align 4
  %51 = mul nsw i32 2, %50
  %52 = add nsw i32 %51, 1
  %53 = load i32, ptr %7, align 4
  %54 = icmp slt i32 %52, %53
  br i1 %54, label %55, label %65

55:
  %56 = load ptr, ptr %3, align 8
  %57 = load i32, ptr %5, align 4
  %58 = load i32, ptr %9, align 4
  %59 = mul nsw i32 2, %58
  %60 = add nsw i32 %57, %59
  %61 = add nsw i32 %60, 1
  %62 = sext i32 %61 to i64
  %63 = getelementptr inbounds <16 x float>, ptr %56, i64 %62
  %64 = load <16 x float>, ptr %63, align 64
  br label %67

65:
  %66 = load <16 x float>, ptr %10, align 64
  br label %67

67:
  %68 = phi <16 x float> [ %64, %55 ], [ %66, %65 ]
  store <16 x float> %68, ptr %11, align 64
  %69 = load <16 x float>, ptr %10, align 64
  %70 = load <16 x float>, ptr %11, align 64
  %71 = load i32, ptr %8, align 4
  %72 = call <16 x float> @halved(<16 x float> noundef %69, <16 x float> noundef %70, i32 noundef %71)
  %73 = load ptr, ptr %3, align 8
  %74 = load i32, ptr %5, align 4
  %75 = load i32, ptr %9, align 4
  %76 = add nsw i32 %74, %75
  %77 = sext i32 %76 to i64
  %78 = getelementptr inbounds <16 x float>, ptr %73, i64 %77
  store <16 x float> %72, ptr %78, align 64
  br label %79

79:
  %80 = load i32, ptr %9, align 4
  %81 = add nsw i32 %80, 1
  store i32 %81, ptr %9, align 4
  br label %34, !llvm.loop !23

82:
  %83 = load i32, ptr %7, align 4
  %84 = add nsw i32 %83, 1
  %85 = sdiv i32 %84, 2
  store i32 %85, ptr %7, align 4
  br label %86

86:
  %87 = load i32, ptr %8, align 4
  %88 = sdiv i32 %87, 2
  store i32 %88, ptr %8, align 4
  br label %29, !llvm.loop !25

89:
  %90 = load ptr, ptr %3, align 8
  %91 = load i32, ptr %5, align 4
  %92 = sext i32 %91 to i64
  %93 = getelementptr inbounds <16 x float>, ptr %90, i64 %92
  %94 = load <16 x float>, ptr %93, align 64
  %95 = load ptr, ptr %3, align 8
  %96 = load i32, ptr %5, align 4
  %97 = sdiv i32 %96, 16
  %98 = sext i32 %97 to i64
  %99 = getelementptr inbounds <16 x float>, ptr %95, i64 %98
  store <16 x float> %94, ptr %99, align 64
  br label %100

100:
  %101 = load i32, ptr %5, align 4
  %102 = add nsw i32 %101, 16
  store i32 %102, ptr %5, align 4
  br label %12, !llvm.loop !26

103:
  ret void
}

define internal <16 x float> @halved(<16 x float> noundef %0, <16 x float> noundef %1, i32 noundef %2) #11 {
  %4 = alloca <16 x float>, align 64
  %5 = alloca <16 x float>, align 64
  %6 = alloca i32, align 4
  %7 = alloca <16 x float>, align 64
  %8 = alloca <16 x float>, align 64
  %9 = alloca i32, align 4
  %10 = alloca i32, align 4
  store <16 x float> %0, ptr %4, align 64
  store <16 x float> %1, ptr %5, align 64
  store i32 %2, ptr %6, align 4
  store i32 0, ptr %9, align 4
  br label %11

11:
  %12 = load i32, ptr %9, align 4
  %13 = icmp slt i32 %12, 8
  br i1 %13, label %15, label %14

14:
  br label %58

15:
  %16 = load i32, ptr %9, align 4
  %17 = mul nsw i32 2, %16
  %18 = load i32, ptr %9, align 4
  %19 = load i32, ptr %6, align 4
  %20 = sdiv i32 %19, 2
  %21 = srem i32 %18, %20
  %22 = sub nsw i32 %17, %21
  store i32 %22, ptr %10, align 4
  %23 = load <16 x float>, ptr %4, align 64
  %24 = load i32, ptr %10, align 4
  %25 = extractelement <16 x float> %23, i32 %24
  %26 = load i32, ptr %9, align 4
  %27 = load <16 x float>, ptr %7, align 64
  %28 = insertelement <16 x float> %27, float %25, i32 %26
  store <16 x float> %28, ptr %7, align 64
  %29 = load <16 x float>, ptr %5, align 64
  %30 = load i32, ptr %10, align 4
  %31 = extractelement <16 x float> %29, i32 %30
  %32 = load i32, ptr %9, align 4
  %33 = add nsw i32 8, %32
  %34 = load <16 x float>, ptr %7, align 64
  %35 = insertelement <16 x float> %34, float %31, i32 %33
  store <16 x float> %35, ptr %7, align 64
  %36 = load <16 x float>, ptr %4, align 64
  %37 = load i32, ptr %10, align 4
  %38 = load i32, ptr %6, align 4
  %39 = sdiv i32 %38, 2
  %40 = add nsw i32 %37, %39
  %41 = extractelement <16 x float> %36, i32 %40
  %42 = load i32, ptr %9, align 4
  %43 = load <16 x float>, ptr %8, align 64
  %44 = insertelement <16 x float> %43, float %41, i32 %42
  store <16 x float> %44, ptr %8, align 64
  %45 = load <16 x float>, ptr %5, align 64
  %46 = load i32, ptr %10, align 4
  %47 = load i32, ptr %6, align 4
  %48 = sdiv i32 %47, 2
  %49 = add nsw i32 %46, %48
  %50 = extractelement <16 x float> %45, i32 %49
  %51 = load i32, ptr %9, align 4
  %52 = add nsw i32 8, %51
  %53 = load <16 x float>, ptr %8, align 64
  %54 = insertelement <16 x float> %53, float %50, i32 %52
  store <16 x float> %54, ptr %8, align 64
  br label %55

55:
  %56 = load i32, ptr %9, align 4
  %57 = add nsw i32 %56, 1
  store i32 %57, ptr %9, align 4
  br label %11, !llvm.loop !27

58:
  %59 = load <16 x float>, ptr %7, align 64
  %60 = load <16 x float>, ptr %8, align 64
  %61 = fadd <16 x float> %59, %60
  ret <16 x float> %61
}

define internal void @outputs_of(i64 noundef %0, ptr noundef %1, i32 noundef %2) #1 {
  %4 = alloca i64, align 8
  %5 = alloca ptr, align 8
  %6 = alloca i32, align 4
  %7 = alloca i64, align 8
  %8 = alloca i64, align 8
  %9 = alloca i32, align 4
  %10 = alloca i64, align 8
  %11 = alloca i64, align 8
  %12 = alloca ptr, align 8
  %13 = alloca ptr, align 8
  %14 = alloca ptr, align 8
  store i64 %0, ptr %4, align 8
  store ptr %1, ptr %5, align 8
  store i32 %2, ptr %6, align 4
  %15 = load i64, ptr %4, align 8
  %16 = add nsw i64 %15, 1
  %17 = mul nsw i64 %16, 48
  %18 = load ptr, ptr %5, align 8
  %19 = getelementptr inbounds nuw %struct.Product, ptr %18, i32 0, i32 5
  %20 = load i64, ptr %19, align 8
  %21 = call i64 @min_of(i64 noundef %17, i64 noundef %20)
  store i64 %21, ptr %7, align 8
  store i64 0, ptr %8, align 8
  br label %22

22:
  %23 = load i64, ptr %8, align 8
  %24 = load ptr, ptr %5, align 8
  %25 = getelementptr inbounds nuw %struct.Product, ptr %24, i32 0, i32 3
  %26 = load i64, ptr %25, align 8
  %27 = icmp slt i64 %23, %26
  br i1 %27, label %29, label %28

28:
  store i32 2, ptr %9, align 4
  br label %176

29:
  %30 = load i64, ptr %4, align 8
  %31 = mul nsw i64 %30, 48
  store i64 %31, ptr %10, align 8
  br label %32

32:
  %33 = load i64, ptr %10, align 8
  %34 = load i64, ptr %7, align 8
  %35 = icmp slt i64 %33, %34
  br i1 %35, label %37, label %36

36:
  store i32 5, ptr %9, align 4
  br label %172

37:
  %38 = load i64, ptr %10, align 8
  %39 = load ptr, ptr %5, align 8
  %40 = getelementptr inbounds nuw %struct.Product, ptr %39, i32 0, i32 5
  %41 = load i64, ptr %40, align 8
  %42 = sub nsw i64 %41, 3
  %43 = call i64 @min_of(i64 noundef %38, i64 noundef %42)
  store i64 %43, ptr %11, align 8
  %44 = load ptr, ptr %5, align 8
  %45 = getelementptr inbounds nuw %struct.Product, ptr %44, i32 0, i32 0
  %46 = load ptr, ptr %45, align 8
  %47 = load i64, ptr %8, align 8
  %48 = load ptr, ptr %5, align 8
  %49 = getelementptr inbounds nuw %struct.Product, ptr %48, i32 0, i32 4
  %50 = load i64, ptr %49, align 8
  %51 = mul nsw i64 %47, %50
  %52 = getelementptr inbounds float, ptr %46, i64 %51
  store ptr %52, ptr %12, align 8
  %53 = load ptr, ptr %5, align 8
  %54 = getelementptr inbounds nuw %struct.Product, ptr %53, i32 0, i32 1
  %55 = load ptr, ptr %54, align 8
  %56 = load i64, ptr %11, align 8
  %57 = load ptr, ptr %5, align 8
  %58 = getelementptr inbounds nuw %struct.Product, ptr %57, i32 0, i32 4
  %59 = load i64, ptr %58, align 8
  %60 = mul nsw i64 %56, %59
  %61 = load i32, ptr %6, align 4
  %62 = call ptr @element(ptr noundef %55, i64 noundef %60, i32 noundef %61)
  store ptr %62, ptr %13, align 8
  %63 = load ptr, ptr %5, align 8
  %64 = getelementptr inbounds nuw %struct.Product, ptr %63, i32 0, i32 2
  %65 = load ptr, ptr %64, align 8
  %66 = load i64, ptr %8, align 8
  %67 = load ptr, ptr %5, align 8
  %68 = getelementptr inbounds nuw %struct.Product, ptr %67, i32 0, i32 5
  %69 = load i64, ptr %68, align 8
  %70 = mul nsw i64 %66, %69
  %71 = getelementptr inbounds float, ptr %65, i64 %70
  %72 = load i64, ptr %11, align 8
  %73 = getelementptr inbounds float, ptr %71, i64 %72
  store ptr %73, ptr %14, align 8
  %74 = load ptr, ptr %5, align 8
  %75 = getelementptr inbounds nuw %struct.Product, ptr %74, i32 0, i32 3
  %76 = load i64, ptr %75, align 8
  %77 = load i64, ptr %8, align 8
  %78 = sub nsw i64 %76, %77
  %79 = call i64 @min_of(i64 noundef %78, i64 noundef 8)
  switch i64 %79, label %168 [
    i64 1, label %80
    i64 2, label %91
    i64 3, label %102
    i64 4, label %113
    i64 5, label %124
    i64 6, label %135
    i64 7, label %146
    i64 8, label %157
  ]

80:
  %81 = load ptr, ptr %12, align 8
  %82 = load ptr, ptr %13, align 8
  %83 = load ptr, ptr %14, align 8
  %84 = load ptr, ptr %5, align 8
  %85 = getelementptr inbounds nuw %struct.Product, ptr %84, i32 0, i32 4
  %86 = load i64, ptr %85, align 8
  %87 = load ptr, ptr %5, align 8
  %88 = getelementptr inbounds nuw %struct.Product, ptr %87, i32 0, i32 5
  %89 = load i64, ptr %88, align 8
  %90 = load i32, ptr %6, align 4
  call void @tile(ptr noundef %81, ptr noundef %82, ptr noundef %83, i64 noundef %86, i64 noundef %89, i32 noundef 1, i32 noundef 3, i32 noundef %90)
  br label %168

91:
  %92 = load ptr, ptr %12, align 8
  %93 = load ptr, ptr %13, align 8
  %94 = load ptr, ptr %14, align 8
  %95 = load ptr, ptr %5, align 8
  %96 = getelementptr inbounds nuw %struct.Product, ptr %95, i32 0, i32 4
  %97 = load i64, ptr %96, align 8
  %98 = load ptr, ptr %5, align 8
  %99 = getelementptr inbounds nuw %struct.Product, ptr %98, i32 0, i32 5
  %100 = load i64, ptr %99, align 8
  %101 = load i32, ptr %6, align 4
  call void @tile(ptr noundef %92, ptr noundef %93, ptr noundef %94, i64 noundef %97, i64 noundef %100, i32 noundef 2, i32 noundef 3, i32 noundef %101)
  br label %168

102:
  %103 = load ptr, ptr %12, align 8
  %104 = load ptr, ptr %13, align 8
  %105 = load ptr, ptr %14, align 8
  %106 = load ptr, ptr %5, align 8
  %107 = getelementptr inbounds nuw %struct.Product, ptr %106, i32 0, i32 4
  %108 = load i64, ptr %107, align 8
  %109 = load ptr, ptr %5, align 8
  %110 = getelementptr inbounds nuw %struct.Product, ptr %109, i32 0, i32 5
  %111 = load i64, ptr %110, align 8
  %112 = load i32, ptr %6, align 4
  call void @tile(ptr noundef %103, ptr noundef %104, ptr noundef %105, i64 noundef %108, i64 noundef %111, i32 noundef 3, i32 noundef 3, i32 noundef %112)
  br label %168

113:
  %114 = load ptr, ptr %12, align 8
  %115 = load ptr, ptr %13, align 8
  %116 = load ptr, ptr %14, align 8
  %117 = load ptr, ptr %5, align 8
  %118 = getelementptr inbounds nuw %struct.Product, ptr %117, i32 0, i32 4
  %119 = load i64, ptr %118, align 8
  %120 = load ptr, ptr %5, align 8
  %121 = getelementptr inbounds nuw %struct.Product, ptr %120, i32 0, i32 5
  %122 = load i64, ptr %121, align 8
  %123 = load i32, ptr %6, align 4
  call void @tile(ptr noundef %114, ptr noundef %115, ptr noundef %116, i64 noundef %119, i64 noundef %122, i32 noundef 4, i32 noundef 3, i32 noundef %123)
  br label %168

124:
  %125 = load ptr, ptr %12, align 8
  %126 = load ptr, ptr %13, align 8
  %127 = load ptr, ptr %14, align 8
  %128 = load ptr, ptr %5, align 8
  %129 = getelementptr inbounds nuw %struct.Product, ptr %128, i32 0, i32 4
  %130 = load i64, ptr %129, align 8
  %131 = load ptr, ptr %5, align 8
  %132 = getelementptr inbounds nuw %struct.Product, ptr %131, i32 0, i32 5
  %133 = load i64, ptr %132, align 8
  %134 = load i32, ptr %6, align 4
  call void @tile(ptr noundef %125, ptr noundef %126, ptr noundef %127, i64 noundef %130, i64 noundef %133, i32 noundef 5, i32 noundef 3, i32 noundef %134)
  br label %168

135:
  %136 = load ptr, ptr %12, align 8
  %137 = load ptr, ptr %13, align 8
  %138 = load ptr, ptr %14, align 8
  %139 = load ptr, ptr %5, align 8
  %140 = getelementptr inbounds nuw %struct.Product, ptr %139, i32 0, i32 4
  %141 = load i64, ptr %140, align 8
  %142 = load ptr, ptr %5, align 8
  %143 = getelementptr inbounds nuw %struct.Product, ptr %142, i32 0, i32 5
  %144 = load i64, ptr %143, align 8
  %145 = load i32, ptr %6, align 4
  call void @tile(ptr noundef %136, ptr noundef %137, ptr noundef %138, i64 noundef %141, i64 noundef %144, i32 noundef 6, i32 noundef 3, i32 noundef %145)
  br label %168

146:
  %147 = load ptr, ptr %12, align 8
  %148 = load ptr, ptr %13, align 8
  %149 = load ptr, ptr %14, align 8
  %150 = load ptr, ptr %5, align 8
  %151 = getelementptr inbounds nuw %struct.Product, ptr %150, i32 0, i32 4
  %152 = load i64, ptr %151, align 8
  %153 = load ptr, ptr %5, align 8
  %154 = getelementptr inbounds nuw %struct.Product, ptr %153, i32 0, i32 5
  %155 = load i64, ptr %154, align 8
  %156 = load i32, ptr %6, align 4
  call void @tile(ptr noundef %147, ptr noundef %148, ptr noundef %149, i64 noundef %152, i64 noundef %155, i32 noundef 7, i32 noundef 3, i32 noundef %156)
  br label %168

157:
  %158 = load ptr, ptr %12, align 8
  %159 = load ptr, ptr %13, align 8
  %160 = load ptr, ptr %14, align 8
  %161 = load ptr, ptr %5, align 8
  %162 = getelementptr inbounds nuw %struct.Product, ptr %161, i32 0, i32 4
  %163 = load i64, ptr %162, align 8
  %164 = load ptr, ptr %5, align 8
  %165 = getelementptr inbounds nuw %struct.Product, ptr %164, i32 0, i32 5
  %166 = load i64, ptr %165, align 8
  %167 = load i32, ptr %6, align 4
  call void @tile(ptr noundef %158, ptr noundef %159, ptr noundef %160, i64 noundef %163, i64 noundef %166, i32 noundef 8, i32 noundef 3, i32 noundef %167)
  br label %168

168:
  br label %169

169:
  %170 = load i64, ptr %10, align 8
  %171 = add nsw i64 %170, 3
  store i64 %171, ptr %10, align 8
  br label %32, !llvm.loop !28

172:
  br label %173

173:
  %174 = load i64, ptr %8, align 8
  %175 = add nsw i64 %174, 8
  store i64 %175, ptr %8, align 8
  br label %22, !llvm.loop !29

176:
  ret void
}

define internal ptr @element(ptr noundef %0, i64 noundef %1, i32 noundef %2) #1 {
  %4 = alloca ptr, align 8
  %5 = alloca i64, align 8
  %6 = alloca i32, align 4
  store ptr %0, ptr %4, align 8
  store i64 %1, ptr %5, align 8
  store i32 %2, ptr %6, align 4
  %7 = load ptr, ptr %4, align 8
  %8 = load i64, ptr %5, align 8
  %9 = load i32, ptr %6, align 4
  %10 = call i64 @bytes_of(i32 noundef %9)
  %11 = mul nsw i64 %8, %10
  %12 = getelementptr inbounds i8, ptr %7, i64 %11
  ret ptr %12
}

define internal void @tile(ptr noundef %0, ptr noundef %1, ptr noundef %2, i64 noundef %3, i64 noundef %4, i32 noundef %5, i32 noundef %6, i32 noundef %7) #1 {
  %9 = alloca ptr, align 8
  %10 = alloca ptr, align 8
  %11 = alloca ptr, align 8
  %12 = alloca i64, align 8
  %13 = alloca i64, align 8
  %14 = alloca i32, align 4
  %15 = alloca i32, align 4
  %16 = alloca i32, align 4
  %17 = alloca [40 x <16 x float>], align 64
  %18 = alloca i32, align 4
  %19 = alloca i64, align 8
  %20 = alloca i64, align 8
  %21 = alloca i64, align 8
  %22 = alloca i64, align 8
  %23 = alloca i32, align 4
  %24 = alloca i64, align 8
  %25 = alloca i32, align 4
  store ptr %0, ptr %9, align 8
  store ptr %1, ptr %10, align 8
  store ptr %2, ptr %11, align 8
  store i64 %3, ptr %12, align 8
  store i64 %4, ptr %13, align 8
  store i32 %5, ptr %14, align 4
  store i32 %6, ptr %15, align 4
  store i32 %7, ptr %16, align 4
  store i32 0, ptr %18, align 4
  br label %26

26:
  %27 = load i32, ptr %18, align 4
  %28 = load i32, ptr %14, align 4
  %29 = load i32, ptr %15, align 4
  %30 = mul nsw i32 %28, %29
  %31 = icmp slt i32 %27, %30
  br i1 %31, label %33, label %32

32:
  br label %40

33:
  %34 = load i32, ptr %18, align 4
  %35 = sext i32 %34 to i64
  %36 = getelementptr inbounds [40 x <16 x float>], ptr %17, i64 0, i64 %35
  store <16 x float> zeroinitializer, ptr %36, align 64
  br label %37

37:
  %38 = load i32, ptr %18, align 4
  %39 = add nsw i32 %38, 1
  store i32 %39, ptr %18, align 4
  br label %26, !llvm.loop !30

40:
  %41 = load i32, ptr %16, align 4
  %42 = call i64 @bytes_of(i32 noundef %41)
  %43 = sdiv i64 64, %42
  %44 = call i64 @max_of(i64 noundef %43, i64 noundef 16)
  store i64 %44, ptr %19, align 8
  %45 = load i64, ptr %12, align 8
  %46 = load i64, ptr %19, align 8
  %47 = sub nsw i64 0, %46
  %48 = and i64 %45, %47
  store i64 %48, ptr %20, align 8
  %49 = load i64, ptr %12, align 8
  %50 = and i64 %49, -16
  store i64 %50, ptr %21, align 8
  store i64 0, ptr %22, align 8
  br label %51

51:
  %52 = load i64, ptr %22, align 8
  %53 = load i64, ptr %20, align 8
  %54 = icmp slt i64 %52, %53
  br i1 %54, label %55, label %103

55:
  store i32 0, ptr %23, align 4
  br label %56

56:
  %57 = load i32, ptr %23, align 4
  %58 = load i32, ptr %15, align 4
  %59 = icmp slt i32 %57, %58
  br i1 %59, label %61, label %60

60:
  br label %78

61:
  %62 = load ptr, ptr %10, align 8
  %63 = load i32, ptr %23, align 4
  %64 = sext i32 %63 to i64
  %65 = load i64, ptr %12, align 8
  %66 = mul nsw i64 %64, %65
  %67 = load i64, ptr %22, align 8
  %68 = add nsw i64 %66, %67
  %69 = load i32, ptr %16, align 4
  %70 = call ptr @element(ptr noundef %62, i64 noundef %68, i32 noundef %69)
  %71 = load i64, ptr %19, align 8
  %72 = load i32, ptr %16, align 4
  %73 = call i64 @bytes_of(i32 noundef %72)
  %74 = mul nsw i64 %71, %73
  call void @prefetch(ptr noundef %70, i64 noundef %74, i64 noundef 8192)
  br label %75

75:
  %76 = load i32, ptr %23, align 4
  %77 = add nsw i32 %76, 1
  store i32 %77, ptr %23, align 4
  br label %56, !llvm.loop !31

78:
  store i64 0, ptr %24, align 8
  br label %79

79:
  %80 = load i64, ptr %24, align 8
  %81 = load i64, ptr %19, align 8
  %82 = icmp slt i64 %80, %81
  br i1 %82, label %84, label %83

83:
  br label %98

84:
  %85 = load ptr, ptr %9, align 8
  %86 = load ptr, ptr %10, align 8
  %87 = getelementptr inbounds [40 x <16 x float>], ptr %17, i64 0, i64 0
  %88 = load i64, ptr %12, align 8
  %89 = load i64, ptr %22, align 8
  %90 = load i64, ptr %24, align 8
  %91 = add nsw i64 %89, %90
  %92 = load i32, ptr %14, align 4
  %93 = load i32, ptr %15, align 4
  %94 = load i32, ptr %16, align 4
  call void @add_products(ptr noundef %85, ptr noundef %86, ptr noundef %87, i64 noundef %88, i64 noundef %91, i64 noundef 16, i32 noundef %92, i32 noundef %93, i32 noundef %94)
  br label %95

95:
  %96 = load i64, ptr %24, align 8
  %97 = add nsw i64 %96, 16
  store i64 %97, ptr %24, align 8
  br label %79, !llvm.loop !32

98:
  br label %99

99:
  %100 = load i64, ptr %19, align 8
  %101 = load i64, ptr %22, align 8
  %102 = add nsw i64 %101, %100
  store i64 %102, ptr %22, align 8
  br label %51, !llvm.loop !33

103:
  br label %104

104:
  %105 = load i64, ptr %22, align 8
  %106 = load i64, ptr %21, align 8
  %107 = icmp slt i64 %105, %106
  br i1 %107, label %108, label %120

108:
  %109 = load ptr, ptr %9, align 8
  %110 = load ptr, ptr %10, align 8
  %111 = getelementptr inbounds [40 x <16 x float>], ptr %17, i64 0, i64 0
  %112 = load i64, ptr %12, align 8
  %113 = load i64, ptr %22, align 8
  %114 = load i32, ptr %14, align 4
  %115 = load i32, ptr %15, align 4
  %116 = load i32, ptr %16, align 4
  call void @add_products(ptr noundef %109, ptr noundef %110, ptr noundef %111, i64 noundef %112, i64 noundef %113, i64 noundef 16, i32 noundef %114, i32 noundef %115, i32 noundef %116)
  br label %117

117:
  %118 = load i64, ptr %22, align 8
  %119 = add nsw i64 %118, 16
  store i64 %119, ptr %22, align 8
  br label %104, !llvm.loop !34

120:
  %121 = load i64, ptr %22, align 8
  %122 = load i64, ptr %12, align 8
  %123 = icmp slt i64 %121, %122
  br i1 %123, label %124, label %136

124:
  %125 = load ptr, ptr %9, align 8
  %126 = load ptr, ptr %10, align 8
  %127 = getelementptr inbounds [40 x <16 x float>], ptr %17, i64 0, i64 0
  %128 = load i64, ptr %12, align 8
  %129 = load i64, ptr %22, align 8
  %130 = load i64, ptr %12, align 8
  %131 = load i64, ptr %22, align 8
  %132 = sub nsw i64 %130, %131
  %133 = load i32, ptr %14, align 4
  %134 = load i32, ptr %15, align 4
  %135 = load i32, ptr %16, align 4
  call void @add_products(ptr noundef %125, ptr noundef %126, ptr noundef %127, i64 noundef %128, i64 noundef %129, i64 noundef %132, i32 noundef %133, i32 noundef %134, i32 noundef %135)
  br label %136

136:
  %137 = getelementptr inbounds [40 x <16 x float>], ptr %17, i64 0, i64 0
  %138 = load i32, ptr %14, align 4
  %139 = load i32, ptr %15, align 4
  %140 = mul nsw i32 %138, %139
  call void @sums(ptr noundef %137, i32 noundef %140)
  store i32 0, ptr %25, align 4
  br label %141

141:
  %142 = load i32, ptr %25, align 4
  %143 = load i32, ptr %14, align 4
  %144 = load i32, ptr %15, align 4
  %145 = mul nsw i32 %143, %144
  %146 = icmp slt i32 %142, %145
  br i1 %146, label %148, label %147

147:
  br label %173

148:
  %149 = load i32, ptr %25, align 4
  %150 = sdiv i32 %149, 16
  %151 = sext i32 %150 to i64
  %152 = getelementptr inbounds [40 x <16 x float>], ptr %17, i64 0, i64 %151
  %153 = load <16 x float>, ptr %152, align 64
  %154 = load i32, ptr %25, align 4
  %155 = srem i32 %154, 16
  %156 = extractelement <16 x float> %153, i32 %155
  %157 = load ptr, ptr %11, align 8
  %158 = load i32, ptr %25, align 4
  %159 = load i32, ptr %15, align 4
  %160 = sdiv i32 %158, %159
  %161 = sext i32 %160 to i64
  %162 = load i64, ptr %13, align 8
  %163 = mul nsw i64 %161, %162
  %164 = load i32, ptr %25, align 4
  %165 = load i32, ptr %15, align 4
  %166 = srem i32 %164, %165
  %167 = sext i32 %166 to i64
  %168 = add nsw i64 %163, %167
  %169 = getelementptr inbounds float, ptr %157, i64 %168
  store float %156, ptr %169, align 4
  br label %170

170:
  %171 = load i32, ptr %25, align 4
  %172 = add nsw i32 %171, 1
  store i32 %172, ptr %25, align 4
  br label %141, !llvm.loop !35

173:
  ret void
}

define internal i64 @bytes_of(i32 noundef %0) #1 {
  %2 = alloca i32, align 4
  store i32 %0, ptr %2, align 4
  %3 = load i32, ptr %2, align 4
  %4 = icmp eq i32 %3, 0
  br i1 %4, label %5, label %6

5:
  br label %11

6:
  %7 = load i32, ptr %2, align 4
  %8 = icmp eq i32 %7, 3
  %9 = zext i1 %8 to i64
  %10 = select i1 %8, i32 1, i32 2
  br label %11

11:
  %12 = phi i32 [ 4, %5 ], [ %10, %6 ]
  %13 = sext i32 %12 to i64
  ret i64 %13
}

define internal void @prefetch(ptr noundef %0, i64 noundef %1, i64 noundef %2) #1 {
  %4 = alloca ptr, align 8
  %5 = alloca i64, align 8
  %6 = alloca i64, align 8
  %7 = alloca i64, align 8
  store ptr %0, ptr %4, align 8
  store i64 %1, ptr %5, align 8
  store i64 %2, ptr %6, align 8
  store i64 0, ptr %7, align 8
  br label %8

8:
  %9 = load i64, ptr %7, align 8
  %10 = load i64, ptr %5, align 8
  %11 = icmp slt i64 %9, %10
  br i1 %11, label %13, label %12

12:
  br label %22

13:
  %14 = load ptr, ptr %4, align 8
  %15 = load i64, ptr %6, align 8
  %16 = getelementptr inbounds i8, ptr %14, i64 %15
  %17 = load i64, ptr %7, align 8
  %18 = getelementptr inbounds i8, ptr %16, i64 %17
  call void @llvm.prefetch.p0(ptr %18, i32 0, i32 2, i32 1)
  br label %19

19:
  %20 = load i64, ptr %7, align 8
  %21 = add nsw i64 %20, 64
  store i64 %21, ptr %7, align 8
  br label %8, !llvm.loop !36

22:
  ret void
}

define internal void @add_products(ptr noundef %0, ptr noundef %1, ptr noundef %2, i64 noundef %3, i64 noundef %4, i64 noundef %5, i32 noundef %6, i32 noundef %7, i32 noundef %8) #11 {
  %10 = alloca ptr, align 8
  %11 = alloca ptr, align 8
  %12 = alloca ptr, align 8
  %13 = alloca i64, align 8
  %14 = alloca i64, align 8
  %15 = alloca i64, align 8
  %16 = alloca i32, align 4
  %17 = alloca i32, align 4
  %18 = alloca i32, align 4
  %19 = alloca [4 x <16 x float>], align 64
  %20 = alloca i32, align 4
  %21 = alloca i32, align 4
  %22 = alloca i32, align 4
  %23 = alloca <16 x float>, align 64
  %24 = alloca i32, align 4
  store ptr %0, ptr %10, align 8
  store ptr %1, ptr %11, align 8
  store ptr %2, ptr %12, align 8
  store i64 %3, ptr %13, align 8
  store i64 %4, ptr %14, align 8
  store i64 %5, ptr %15, align 8
  store i32 %6, ptr %16, align 4
  store i32 %7, ptr %17, align 4
  store i32 %8, ptr %18, align 4
  store i32 0, ptr %20, align 4
  br label %25

25:
  %26 = load i32, ptr %20, align 4
  %27 = load i32, ptr %17, align 4
  %28 = icmp slt i32 %26, %27
  br i1 %28, label %30, label %29

29:
  br label %49

30:
  %31 = load ptr, ptr %11, align 8
  %32 = load i32, ptr %20, align 4
  %33 = sext i32 %32 to i64
  %34 = load i64, ptr %13, align 8
  %35 = mul nsw i64 %33, %34
  %36 = load i64, ptr %14, align 8
  %37 = add nsw i64 %35, %36
  %38 = load i32, ptr %18, align 4
  %39 = call ptr @element(ptr noundef %31, i64 noundef %37, i32 noundef %38)
  %40 = load i64, ptr %15, align 8
  %41 = load i32, ptr %18, align 4
  %42 = call <16 x float> @load_some(ptr noundef %39, i64 noundef %40, i32 noundef %41)
  %43 = load i32, ptr %20, align 4
  %44 = sext i32 %43 to i64
  %45 = getelementptr inbounds [4 x <16 x float>], ptr %19, i64 0, i64 %44
  store <16 x float> %42, ptr %45, align 64
  br label %46

46:
  %47 = load i32, ptr %20, align 4
  %48 = add nsw i32 %47, 1
  store i32 %48, ptr %20, align 4
  br label %25, !llvm.loop !37

49:
  store i32 0, ptr %21, align 4
  br label %50

50:
  %51 = load i32, ptr %21, align 4
  %52 = load i32, ptr %16, align 4
  %53 = icmp slt i32 %51, %52
  br i1 %53, label %55, label %54

54:
  store i32 5, ptr %22, align 4
  br label %102

55:
  %56 = load ptr, ptr %10, align 8
  %57 = load i32, ptr %21, align 4
  %58 = sext i32 %57 to i64
  %59 = load i64, ptr %13, align 8
  %60 = mul nsw i64 %58, %59
  %61 = getelementptr inbounds float, ptr %56, i64 %60
  %62 = load i64, ptr %14, align 8
  %63 = getelementptr inbounds float, ptr %61, i64 %62
  %64 = load i64, ptr %15, align 8
  %65 = call <16 x float> @load_some(ptr noundef %63, i64 noundef %64, i32 noundef 0)
  store <16 x float> %65, ptr %23, align 64
  store i32 0, ptr %24, align 4
  br label %66

66:
  %67 = load i32, ptr %24, align 4
  %68 = load i32, ptr %17, align 4
  %69 = icmp slt i32 %67, %68
  br i1 %69, label %71, label %70

70:
  store i32 8, ptr %22, align 4
  br label %98

71:
  %72 = load <16 x float>, ptr %23, align 64
  %73 = load i32, ptr %24, align 4
  %74 = sext i32 %73 to i64
  %75 = getelementptr inbounds [4 x <16 x float>], ptr %19, i64 0, i64 %74
  %76 = load <16 x float>, ptr %75, align 64
  %77 = load ptr, ptr %12, align 8
  %78 = load i32, ptr %21, align 4
  %79 = load i32, ptr %17, align 4
  %80 = mul nsw i32 %78, %79
  %81 = load i32, ptr %24, align 4
  %82 = add nsw i32 %80, %81
  %83 = sext i32 %82 to i64
  %84 = getelementptr inbounds <16 x float>, ptr %77, i64 %83
  %85 = load <16 x float>, ptr %84, align 64
  %86 = call <16 x float> @fma_(<16 x float> noundef %72, <16 x float> noundef %76, <16 x float> noundef %85)
  %87 = load ptr, ptr %12, align 8
  %88 = load i32, ptr %21, align 4
  %89 = load i32, ptr %17, align 4
  %90 = mul nsw i32 %88, %89
  %91 = load i32, ptr %24, align 4
  %92 = add nsw i32 %90, %91
  %93 = sext i32 %92 to i64
  %94 = getelementptr inbounds <16 x float>, ptr %87, i64 %93
  store <16 x float> %86, ptr %94, align 64
  br label %95

95:
  %96 = load i32, ptr %24, align 4
  %97 = add nsw i32 %96, 1
  store i32 %97, ptr %24, align 4
  br label %66, !llvm.loop !38

98:
  br label %99

99:
  %100 = load i32, ptr %21, align 4
  %101 = add nsw i32 %100, 1
  store i32 %101, ptr %21, align 4
  br label %50, !llvm.loop !39

102:
  ret void
}

declare void @llvm.prefetch.p0(ptr readonly captures(none), i32 immarg, i32 immarg, i32 immarg) #13

define internal <16 x float> @load_some(ptr noundef %0, i64 noundef %1, i32 noundef %2) #11 {
  %4 = alloca ptr, align 8
  %5 = alloca i64, align 8
  %6 = alloca i32, align 4
  %7 = alloca [64 x i8], align 16
  store ptr %0, ptr %4, align 8
  store i64 %1, ptr %5, align 8
  store i32 %2, ptr %6, align 4
  call void @llvm.memset.p0.i64(ptr align 16 %7, i8 0, i64 64, i1 false)
  %8 = getelementptr inbounds [64 x i8], ptr %7, i64 0, i64 0
  %9 = load ptr, ptr %4, align 8
  %10 = load i64, ptr %5, align 8
  %11 = load i32, ptr %6, align 4
  %12 = call i64 @bytes_of(i32 noundef %11)
  %13 = mul nsw i64 %10, %12
  call void @llvm.memcpy.p0.p0.i64(ptr align 16 %8, ptr align 1 %9, i64 %13, i1 false)
  %14 = getelementptr inbounds [64 x i8], ptr %7, i64 0, i64 0
  %15 = load i32, ptr %6, align 4
  %16 = call <16 x float> @load(ptr noundef %14, i32 noundef %15)
  ret <16 x float> %16
}

define internal void @combine_splits(ptr noundef %0, ptr noundef %1) #3 {
  %3 = alloca ptr, align 8
  %4 = alloca ptr, align 8
  %5 = alloca i64, align 8
  %6 = alloca i64, align 8
  %7 = alloca i32, align 4
  %8 = alloca ptr, align 8
  %9 = alloca float, align 4
  %10 = alloca float, align 4
  %11 = alloca ptr, align 8
  %12 = alloca i64, align 8
  %13 = alloca i64, align 8
  %14 = alloca float, align 4
  %15 = alloca i64, align 8
  %16 = alloca float, align 4
  %17 = alloca i64, align 8
  %18 = alloca i32, align 4
  %19 = alloca i64, align 8
  store ptr %0, ptr %3, align 8
  store ptr %1, ptr %4, align 8
  %20 = load ptr, ptr %3, align 8
  %21 = getelementptr inbounds nuw %struct.Attention, ptr %20, i32 0, i32 6
  %22 = load i64, ptr %21, align 8
  %23 = load ptr, ptr %3, align 8
  %24 = getelementptr inbounds nuw %struct.Attention, ptr %23, i32 0, i32 11
  %25 = load i64, ptr %24, align 8
  %26 = mul nsw i64 %22, %25
  %27 = load i64, ptr @head_dim, align 8
  %28 = add nsw i64 %27, 2
  %29 = mul nsw i64 %26, %28
  store i64 %29, ptr %5, align 8
  store i64 0, ptr %6, align 8
  br label %30

30:
  %31 = load i64, ptr %6, align 8
  %32 = load ptr, ptr %3, align 8
  %33 = getelementptr inbounds nuw %struct.Attention, ptr %32, i32 0, i32 6
  %34 = load i64, ptr %33, align 8
  %35 = load ptr, ptr %3, align 8
  %36 = getelementptr inbounds nuw %struct.Attention, ptr %35, i32 0, i32 11
  %37 = load i64, ptr %36, align 8
  %38 = mul nsw i64 %34, %37
  %39 = icmp slt i64 %31, %38
  br i1 %39, label %41, label %40

40:
  store i32 2, ptr %7, align 4
  br label %194

41:
  %42 = load ptr, ptr %3, align 8
  %43 = getelementptr inbounds nuw %struct.Attention, ptr %42, i32 0, i32 5
  %44 = load ptr, ptr %43, align 8
  %45 = load i64, ptr %6, align 8
  %46 = load i64, ptr @head_dim, align 8
  %47 = add nsw i64 %46, 2
  %48 = mul nsw i64 %45, %47
  %49 = getelementptr inbounds float, ptr %44, i64 %48
  store ptr %49, ptr %8, align 8
  store float 0xC6293E5940000000, ptr %9, align 4
  store float 0.000000e+00, ptr %10, align 4
  %50 = load ptr, ptr %4, align 8
  %51 = load ptr, ptr %3, align 8
  %52 = load i64, ptr %6, align 8
  %53 = load ptr, ptr %3, align 8
  %54 = getelementptr inbounds nuw %struct.Attention, ptr %53, i32 0, i32 11
  %55 = load i64, ptr %54, align 8
  %56 = sdiv i64 %52, %55
  %57 = load i64, ptr %6, align 8
  %58 = load ptr, ptr %3, align 8
  %59 = getelementptr inbounds nuw %struct.Attention, ptr %58, i32 0, i32 11
  %60 = load i64, ptr %59, align 8
  %61 = srem i64 %57, %60
  %62 = call i64 @query(ptr noundef %51, i64 noundef %56, i64 noundef %61)
  %63 = getelementptr inbounds float, ptr %50, i64 %62
  store ptr %63, ptr %11, align 8
  store i64 0, ptr %12, align 8
  br label %64

64:
  %65 = load i64, ptr %12, align 8
  %66 = load i64, ptr @head_dim, align 8
  %67 = icmp slt i64 %65, %66
  br i1 %67, label %69, label %68

68:
  store i32 5, ptr %7, align 4
  br label %76

69:
  %70 = load ptr, ptr %11, align 8
  %71 = load i64, ptr %12, align 8
  %72 = getelementptr inbounds float, ptr %70, i64 %71
  store float 0.000000e+00, ptr %72, align 4
  br label %73

73:
  %74 = load i64, ptr %12, align 8
  %75 = add nsw i64 %74, 1
  store i64 %75, ptr %12, align 8
  br label %64, !llvm.loop !40

76:
  store i64 0, ptr %13, align 8
  br label %77

77:
  %78 = load i64, ptr %13, align 8
  %79 = load ptr, ptr %3, align 8
  %80 = getelementptr inbounds nuw %struct.Attention, ptr %79, i32 0, i32 14
  %81 = load i64, ptr %80, align 8
  %82 = icmp slt i64 %78, %81
  br i1 %82, label %84, label %83

83:
  store i32 8, ptr %7, align 4
  br label %105

84:
  %85 = load ptr, ptr %8, align 8
  %86 = load i64, ptr %13, align 8
  %87 = load i64, ptr %5, align 8
  %88 = mul nsw i64 %86, %87
  %89 = load i64, ptr @head_dim, align 8
  %90 = add nsw i64 %88, %89
  %91 = getelementptr inbounds float, ptr %85, i64 %90
  %92 = load float, ptr %91, align 4
  store float %92, ptr %14, align 4
  %93 = load float, ptr %14, align 4
  %94 = load float, ptr %9, align 4
  %95 = fcmp ogt float %93, %94
  br i1 %95, label %96, label %98

96:
  %97 = load float, ptr %14, align 4
  br label %100

98:
  %99 = load float, ptr %9, align 4
  br label %100

100:
  %101 = phi float [ %97, %96 ], [ %99, %98 ]
  store float %101, ptr %9, align 4
  br label %102

102:
  %103 = load i64, ptr %13, align 8
  %104 = add nsw i64 %103, 1
  store i64 %104, ptr %13, align 8
  br label %77, !llvm.loop !41

105:
  store i64 0, ptr %15, align 8
  br label %106

106:
  %107 = load i64, ptr %15, align 8
  %108 = load ptr, ptr %3, align 8
  %109 = getelementptr inbounds nuw %struct.Attention, ptr %108, i32 0, i32 14
  %110 = load i64, ptr %109, align 8
  %111 = icmp slt i64 %107, %110
  br i1 %111, label %113, label %112

112:
  store i32 11, ptr %7, align 4
  br label %161

113:
  %114 = load ptr, ptr %8, align 8
  %115 = load i64, ptr @head_dim, align 8
  %116 = getelementptr inbounds float, ptr %114, i64 %115
  %117 = load float, ptr %116, align 4
  %118 = load float, ptr %9, align 4
  %119 = fsub float %117, %118
  %120 = insertelement <16 x float> poison, float %119, i64 0
  %121 = shufflevector <16 x float> %120, <16 x float> poison, <16 x i32> zeroinitializer
  %122 = call <16 x float> @exponential(<16 x float> noundef %121)
  %123 = extractelement <16 x float> %122, i32 0
  store float %123, ptr %16, align 4
  store i64 0, ptr %17, align 8
  br label %124

124:
  %125 = load i64, ptr %17, align 8
  %126 = load i64, ptr @head_dim, align 8
  %127 = icmp slt i64 %125, %126
  br i1 %127, label %129, label %128

128:
  store i32 14, ptr %7, align 4
  br label %146

129:
  %130 = load ptr, ptr %8, align 8
  %131 = load i64, ptr %17, align 8
  %132 = getelementptr inbounds float, ptr %130, i64 %131
  %133 = load float, ptr %132, align 4
  %134 = load float, ptr %16, align 4
  %135 = load ptr, ptr %11, align 8
  %136 = load i64, ptr %17, align 8
  %137 = getelementptr inbounds float, ptr %135, i64 %136
  %138 = load float, ptr %137, align 4
  %139 = call float @llvm.fma.f32(float %133, float %134, float %138)
  %140 = load ptr, ptr %11, align 8
  %141 = load i64, ptr %17, align 8
  %142 = getelementptr inbounds float, ptr %140, i64 %141
  store float %139, ptr %142, align 4
  br label %143

143:
  %144 = load i64, ptr %17, align 8
  %145 = add nsw i64 %144, 1
  store i64 %145, ptr %17, align 8
  br label %124, !llvm.loop !42

146:
  %147 = load ptr, ptr %8, align 8
  %148 = load i64, ptr @head_dim, align 8
  %149 = add nsw i64 %148, 1
  %150 = getelementptr inbounds float, ptr %147, i64 %149
  %151 = load float, ptr %150, align 4
  %152 = load float, ptr %16, align 4
  %153 = load float, ptr %10, align 4
  %154 = call float @llvm.fma.f32(float %151, float %152, float %153)
  store float %154, ptr %10, align 4
  br label %155

155:
  %156 = load i64, ptr %15, align 8
  %157 = add nsw i64 %156, 1
  store i64 %157, ptr %15, align 8
  %158 = load i64, ptr %5, align 8
  %159 = load ptr, ptr %8, align 8
  %160 = getelementptr inbounds float, ptr %159, i64 %158
  store ptr %160, ptr %8, align 8
  br label %106, !llvm.loop !43

161:
  %162 = load float, ptr %10, align 4
  %163 = fcmp ole float %162, 0.000000e+00
  %164 = xor i1 %163, true
  %165 = zext i1 %164 to i32
  store i32 %165, ptr %18, align 4
  store i64 0, ptr %19, align 8
  br label %166

166:
  %167 = load i64, ptr %19, align 8
  %168 = load i64, ptr @head_dim, align 8
  %169 = icmp slt i64 %167, %168
  br i1 %169, label %171, label %170

170:
  store i32 17, ptr %7, align 4
  br label %190

171:
  %172 = load i32, ptr %18, align 4
  %173 = icmp ne i32 %172, 0
  br i1 %173, label %174, label %181

174:
  %175 = load ptr, ptr %11, align 8
  %176 = load i64, ptr %19, align 8
  %177 = getelementptr inbounds float, ptr %175, i64 %176
  %178 = load float, ptr %177, align 4
  %179 = load float, ptr %10, align 4
  %180 = fdiv float %178, %179
  br label %182

181:
  br label %182

182:
  %183 = phi float [ %180, %174 ], [ 0.000000e+00, %181 ]
  %184 = load ptr, ptr %11, align 8
  %185 = load i64, ptr %19, align 8
  %186 = getelementptr inbounds float, ptr %184, i64 %185
  store float %183, ptr %186, align 4
  br label %187

187:
  %188 = load i64, ptr %19, align 8
  %189 = add nsw i64 %188, 1
  store i64 %189, ptr %19, align 8
  br label %166, !llvm.loop !44

190:
  br label %191

191:
  %192 = load i64, ptr %6, align 8
  %193 = add nsw i64 %192, 1
  store i64 %193, ptr %6, align 8
  br label %30, !llvm.loop !45

194:
  ret void
}

define internal i64 @query(ptr noundef %0, i64 noundef %1, i64 noundef %2) #1 {
  %4 = alloca ptr, align 8
  %5 = alloca i64, align 8
  %6 = alloca i64, align 8
  %7 = alloca i64, align 8
  store ptr %0, ptr %4, align 8
  store i64 %1, ptr %5, align 8
  store i64 %2, ptr %6, align 8
  %8 = load i64, ptr %5, align 8
  %9 = load ptr, ptr %4, align 8
  %10 = getelementptr inbounds nuw %struct.Attention, ptr %9, i32 0, i32 7
  %11 = load i64, ptr %10, align 8
  %12 = sdiv i64 %8, %11
  %13 = load ptr, ptr %4, align 8
  %14 = getelementptr inbounds nuw %struct.Attention, ptr %13, i32 0, i32 11
  %15 = load i64, ptr %14, align 8
  %16 = load ptr, ptr %4, align 8
  %17 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 10
  %18 = load i64, ptr %17, align 8
  %19 = sdiv i64 %15, %18
  %20 = mul nsw i64 %12, %19
  %21 = load i64, ptr %6, align 8
  %22 = load ptr, ptr %4, align 8
  %23 = getelementptr inbounds nuw %struct.Attention, ptr %22, i32 0, i32 10
  %24 = load i64, ptr %23, align 8
  %25 = sdiv i64 %21, %24
  %26 = add nsw i64 %20, %25
  store i64 %26, ptr %7, align 8
  %27 = load i64, ptr %7, align 8
  %28 = load ptr, ptr %4, align 8
  %29 = getelementptr inbounds nuw %struct.Attention, ptr %28, i32 0, i32 7
  %30 = load i64, ptr %29, align 8
  %31 = mul nsw i64 %27, %30
  %32 = load i64, ptr %5, align 8
  %33 = load ptr, ptr %4, align 8
  %34 = getelementptr inbounds nuw %struct.Attention, ptr %33, i32 0, i32 7
  %35 = load i64, ptr %34, align 8
  %36 = srem i64 %32, %35
  %37 = add nsw i64 %31, %36
  %38 = load ptr, ptr %4, align 8
  %39 = getelementptr inbounds nuw %struct.Attention, ptr %38, i32 0, i32 10
  %40 = load i64, ptr %39, align 8
  %41 = mul nsw i64 %37, %40
  %42 = load i64, ptr %6, align 8
  %43 = load ptr, ptr %4, align 8
  %44 = getelementptr inbounds nuw %struct.Attention, ptr %43, i32 0, i32 10
  %45 = load i64, ptr %44, align 8
  %46 = srem i64 %42, %45
  %47 = add nsw i64 %41, %46
  %48 = load i64, ptr @head_dim, align 8
  %49 = mul nsw i64 %47, %48
  ret i64 %49
}

define internal <16 x float> @exponential(<16 x float> noundef %0) #11 {
  %2 = alloca <16 x float>, align 64
  %3 = alloca <16 x float>, align 64
  %4 = alloca <16 x float>, align 64
  %5 = alloca <16 x float>, align 64
  %6 = alloca <16 x float>, align 64
  store <16 x float> %0, ptr %2, align 64
  %7 = load <16 x float>, ptr %2, align 64
  %8 = call <16 x float> @larger(<16 x float> noundef %7, <16 x float> noundef splat (float -8.700000e+01))
  store <16 x float> %8, ptr %2, align 64
  %9 = load <16 x float>, ptr %2, align 64
  %10 = fmul <16 x float> %9, splat (float 0x3FF7154760000000)
  %11 = call <16 x float> @llvm.rint.v16f32(<16 x float> %10)
  store <16 x float> %11, ptr %3, align 64
  %12 = load <16 x float>, ptr %3, align 64
  %13 = load <16 x float>, ptr %3, align 64
  %14 = load <16 x float>, ptr %2, align 64
  %15 = call <16 x float> @fma_(<16 x float> noundef %13, <16 x float> noundef splat (float 0xBFE6300000000000), <16 x float> noundef %14)
  %16 = call <16 x float> @fma_(<16 x float> noundef %12, <16 x float> noundef splat (float 0x3F2BD01060000000), <16 x float> noundef %15)
  store <16 x float> %16, ptr %4, align 64
  store <16 x float> splat (float 0x3F2A0D2CE0000000), ptr %5, align 64
  %17 = load <16 x float>, ptr %5, align 64
  %18 = load <16 x float>, ptr %4, align 64
  %19 = call <16 x float> @fma_(<16 x float> noundef %17, <16 x float> noundef %18, <16 x float> noundef splat (float 0x3F56E879C0000000))
  store <16 x float> %19, ptr %5, align 64
  %20 = load <16 x float>, ptr %5, align 64
  %21 = load <16 x float>, ptr %4, align 64
  %22 = call <16 x float> @fma_(<16 x float> noundef %20, <16 x float> noundef %21, <16 x float> noundef splat (float 0x3F81112100000000))
  store <16 x float> %22, ptr %5, align 64
  %23 = load <16 x float>, ptr %5, align 64
  %24 = load <16 x float>, ptr %4, align 64
  %25 = call <16 x float> @fma_(<16 x float> noundef %23, <16 x float> noundef %24, <16 x float> noundef splat (float 0x3FA5553820000000))
  store <16 x float> %25, ptr %5, align 64
  %26 = load <16 x float>, ptr %5, align 64
  %27 = load <16 x float>, ptr %4, align 64
  %28 = call <16 x float> @fma_(<16 x float> noundef %26, <16 x float> noundef %27, <16 x float> noundef splat (float 0x3FC5555540000000))
  store <16 x float> %28, ptr %5, align 64
  %29 = load <16 x float>, ptr %5, align 64
  %30 = load <16 x float>, ptr %4, align 64
  %31 = call <16 x float> @fma_(<16 x float> noundef %29, <16 x float> noundef %30, <16 x float> noundef splat (float 5.000000e-01))
  store <16 x float> %31, ptr %5, align 64
  %32 = load <16 x float>, ptr %5, align 64
  %33 = load <16 x float>, ptr %4, align 64
  %34 = load <16 x float>, ptr %4, align 64
  %35 = fmul <16 x float> %33, %34
  %36 = load <16 x float>, ptr %4, align 64
  %37 = call <16 x float> @fma_(<16 x float> noundef %32, <16 x float> noundef %35, <16 x float> noundef %36)
  %38 = fadd <16 x float> %37, splat (float 1.000000e+00)
  store <16 x float> %38, ptr %6, align 64
  %39 = load <16 x float>, ptr %6, align 64
  %40 = bitcast <16 x float> %39 to <16 x i32>
  %41 = load <16 x float>, ptr %3, align 64
  %42 = fptosi <16 x float> %41 to <16 x i32>
  %43 = shl <16 x i32> %42, splat (i32 23)
  %44 = add <16 x i32> %40, %43
  %45 = bitcast <16 x i32> %44 to <16 x float>
  ret <16 x float> %45
}

define internal <16 x float> @larger(<16 x float> noundef %0, <16 x float> noundef %1) #11 {
  %3 = alloca <16 x float>, align 64
  %4 = alloca <16 x float>, align 64
  store <16 x float> %0, ptr %3, align 64
  store <16 x float> %1, ptr %4, align 64
  %5 = load <16 x float>, ptr %4, align 64
  %6 = load <16 x float>, ptr %3, align 64
  %7 = fcmp ogt <16 x float> %5, %6
  %8 = sext <16 x i1> %7 to <16 x i32>
  %9 = load <16 x float>, ptr %4, align 64
  %10 = load <16 x float>, ptr %3, align 64
  %11 = icmp slt <16 x i32> %8, zeroinitializer
  %12 = select <16 x i1> %11, <16 x float> %9, <16 x float> %10
  ret <16 x float> %12
}

declare <16 x float> @llvm.rint.v16f32(<16 x float>) #12

define internal void @attend_block(i64 noundef %0, ptr noundef %1, i32 noundef %2) #1 {
  %4 = alloca i64, align 8
  %5 = alloca ptr, align 8
  %6 = alloca i32, align 4
  %7 = alloca i64, align 8
  %8 = alloca i64, align 8
  %9 = alloca i64, align 8
  %10 = alloca i64, align 8
  %11 = alloca i64, align 8
  %12 = alloca i64, align 8
  %13 = alloca float, align 4
  %14 = alloca ptr, align 8
  %15 = alloca i64, align 8
  %16 = alloca i64, align 8
  %17 = alloca i32, align 4
  %18 = alloca %struct.Block, align 8
  %19 = alloca i64, align 8
  %20 = alloca i64, align 8
  %21 = alloca i64, align 8
  %22 = alloca i64, align 8
  %23 = alloca i64, align 8
  %24 = alloca ptr, align 8
  %25 = alloca i64, align 8
  %26 = alloca i64, align 8
  %27 = alloca i64, align 8
  %28 = alloca i64, align 8
  %29 = alloca i64, align 8
  %30 = alloca i64, align 8
  store i64 %0, ptr %4, align 8
  store ptr %1, ptr %5, align 8
  store i32 %2, ptr %6, align 4
  %31 = load i64, ptr %4, align 8
  %32 = load ptr, ptr %5, align 8
  %33 = getelementptr inbounds nuw %struct.Attention, ptr %32, i32 0, i32 6
  %34 = load i64, ptr %33, align 8
  %35 = srem i64 %31, %34
  store i64 %35, ptr %7, align 8
  %36 = load i64, ptr %4, align 8
  %37 = load ptr, ptr %5, align 8
  %38 = getelementptr inbounds nuw %struct.Attention, ptr %37, i32 0, i32 6
  %39 = load i64, ptr %38, align 8
  %40 = sdiv i64 %36, %39
  %41 = load ptr, ptr %5, align 8
  %42 = getelementptr inbounds nuw %struct.Attention, ptr %41, i32 0, i32 14
  %43 = load i64, ptr %42, align 8
  %44 = srem i64 %40, %43
  store i64 %44, ptr %8, align 8
  %45 = load ptr, ptr %5, align 8
  %46 = getelementptr inbounds nuw %struct.Attention, ptr %45, i32 0, i32 16
  %47 = load i64, ptr %46, align 8
  %48 = sub nsw i64 %47, 1
  %49 = load i64, ptr %4, align 8
  %50 = load ptr, ptr %5, align 8
  %51 = getelementptr inbounds nuw %struct.Attention, ptr %50, i32 0, i32 6
  %52 = load i64, ptr %51, align 8
  %53 = sdiv i64 %49, %52
  %54 = load ptr, ptr %5, align 8
  %55 = getelementptr inbounds nuw %struct.Attention, ptr %54, i32 0, i32 14
  %56 = load i64, ptr %55, align 8
  %57 = sdiv i64 %53, %56
  %58 = sub nsw i64 %48, %57
  store i64 %58, ptr %9, align 8
  %59 = load ptr, ptr %5, align 8
  %60 = getelementptr inbounds nuw %struct.Attention, ptr %59, i32 0, i32 14
  %61 = load i64, ptr %60, align 8
  %62 = icmp sgt i64 %61, 1
  br i1 %62, label %63, label %66

63:
  %64 = load i64, ptr %8, align 8
  %65 = mul nsw i64 %64, 256
  br label %67

66:
  br label %67

67:
  %68 = phi i64 [ %65, %63 ], [ 0, %66 ]
  store i64 %68, ptr %10, align 8
  %69 = load ptr, ptr %5, align 8
  %70 = getelementptr inbounds nuw %struct.Attention, ptr %69, i32 0, i32 14
  %71 = load i64, ptr %70, align 8
  %72 = icmp sgt i64 %71, 1
  br i1 %72, label %73, label %76

73:
  %74 = load i64, ptr %10, align 8
  %75 = add nsw i64 %74, 256
  br label %80

76:
  %77 = load ptr, ptr %5, align 8
  %78 = getelementptr inbounds nuw %struct.Attention, ptr %77, i32 0, i32 13
  %79 = load i64, ptr %78, align 8
  br label %80

80:
  %81 = phi i64 [ %75, %73 ], [ %79, %76 ]
  %82 = load ptr, ptr %5, align 8
  %83 = getelementptr inbounds nuw %struct.Attention, ptr %82, i32 0, i32 13
  %84 = load i64, ptr %83, align 8
  %85 = call i64 @min_of(i64 noundef %81, i64 noundef %84)
  store i64 %85, ptr %11, align 8
  %86 = load i64, ptr %9, align 8
  %87 = add nsw i64 %86, 1
  %88 = load ptr, ptr %5, align 8
  %89 = getelementptr inbounds nuw %struct.Attention, ptr %88, i32 0, i32 15
  %90 = load i64, ptr %89, align 8
  %91 = mul nsw i64 %87, %90
  %92 = load ptr, ptr %5, align 8
  %93 = getelementptr inbounds nuw %struct.Attention, ptr %92, i32 0, i32 11
  %94 = load i64, ptr %93, align 8
  %95 = call i64 @min_of(i64 noundef %91, i64 noundef %94)
  store i64 %95, ptr %12, align 8
  %96 = load i64, ptr @head_dim, align 8
  %97 = sitofp i64 %96 to float
  %98 = call float @sqrtf(float noundef %97) #16
  %99 = fdiv float 1.000000e+00, %98
  store float %99, ptr %13, align 4
  %100 = load i64, ptr @head_dim, align 8
  %101 = mul nsw i64 16, %100
  %102 = call ptr @llvm.stacksave.p0()
  store ptr %102, ptr %14, align 8
  %103 = alloca float, i64 %101, align 16
  store i64 %101, ptr %15, align 8
  %104 = load i64, ptr %9, align 8
  %105 = load ptr, ptr %5, align 8
  %106 = getelementptr inbounds nuw %struct.Attention, ptr %105, i32 0, i32 15
  %107 = load i64, ptr %106, align 8
  %108 = mul nsw i64 %104, %107
  store i64 %108, ptr %16, align 8
  br label %109

109:
  %110 = load i64, ptr %16, align 8
  %111 = load i64, ptr %12, align 8
  %112 = icmp slt i64 %110, %111
  br i1 %112, label %114, label %113

113:
  store i32 2, ptr %17, align 4
  br label %316

114:
  call void @llvm.memset.p0.i64(ptr align 8 %18, i8 0, i64 152, i1 false)
  %115 = getelementptr inbounds nuw %struct.Block, ptr %18, i32 0, i32 0
  store ptr %103, ptr %115, align 8
  %116 = getelementptr inbounds nuw %struct.Block, ptr %18, i32 0, i32 1
  %117 = getelementptr inbounds nuw %struct.Block, ptr %18, i32 0, i32 2
  %118 = getelementptr inbounds nuw %struct.Block, ptr %18, i32 0, i32 3
  %119 = getelementptr inbounds nuw %struct.Block, ptr %18, i32 0, i32 4
  %120 = load i64, ptr %12, align 8
  %121 = load i64, ptr %16, align 8
  %122 = sub nsw i64 %120, %121
  %123 = call i64 @min_of(i64 noundef %122, i64 noundef 16)
  store i64 %123, ptr %119, align 8
  %124 = load ptr, ptr %5, align 8
  %125 = getelementptr inbounds nuw %struct.Attention, ptr %124, i32 0, i32 5
  %126 = load ptr, ptr %125, align 8
  %127 = load i64, ptr %8, align 8
  %128 = load ptr, ptr %5, align 8
  %129 = getelementptr inbounds nuw %struct.Attention, ptr %128, i32 0, i32 6
  %130 = load i64, ptr %129, align 8
  %131 = mul nsw i64 %127, %130
  %132 = load i64, ptr %7, align 8
  %133 = add nsw i64 %131, %132
  %134 = load ptr, ptr %5, align 8
  %135 = getelementptr inbounds nuw %struct.Attention, ptr %134, i32 0, i32 11
  %136 = load i64, ptr %135, align 8
  %137 = mul nsw i64 %133, %136
  %138 = load i64, ptr %16, align 8
  %139 = add nsw i64 %137, %138
  %140 = load i64, ptr @head_dim, align 8
  %141 = add nsw i64 %140, 2
  %142 = mul nsw i64 %139, %141
  %143 = getelementptr inbounds float, ptr %126, i64 %142
  %144 = getelementptr inbounds nuw %struct.Block, ptr %18, i32 0, i32 1
  store ptr %143, ptr %144, align 8
  %145 = load ptr, ptr %5, align 8
  %146 = getelementptr inbounds nuw %struct.Attention, ptr %145, i32 0, i32 12
  %147 = load i64, ptr %146, align 8
  store i64 %147, ptr %19, align 8
  store i64 -1, ptr %20, align 8
  store i64 0, ptr %21, align 8
  br label %148

148:
  %149 = load i64, ptr %21, align 8
  %150 = getelementptr inbounds nuw %struct.Block, ptr %18, i32 0, i32 4
  %151 = load i64, ptr %150, align 8
  %152 = icmp slt i64 %149, %151
  br i1 %152, label %154, label %153

153:
  store i32 5, ptr %17, align 4
  br label %259

154:
  %155 = load ptr, ptr %5, align 8
  %156 = load i64, ptr %7, align 8
  %157 = load i64, ptr %16, align 8
  %158 = load i64, ptr %21, align 8
  %159 = add nsw i64 %157, %158
  %160 = call i64 @query(ptr noundef %155, i64 noundef %156, i64 noundef %159)
  store i64 %160, ptr %22, align 8
  %161 = load i64, ptr %22, align 8
  %162 = load ptr, ptr %5, align 8
  %163 = getelementptr inbounds nuw %struct.Attention, ptr %162, i32 0, i32 7
  %164 = load i64, ptr %163, align 8
  %165 = load ptr, ptr %5, align 8
  %166 = getelementptr inbounds nuw %struct.Attention, ptr %165, i32 0, i32 10
  %167 = load i64, ptr %166, align 8
  %168 = mul nsw i64 %164, %167
  %169 = load i64, ptr @head_dim, align 8
  %170 = mul nsw i64 %168, %169
  %171 = sdiv i64 %161, %170
  store i64 %171, ptr %23, align 8
  %172 = load ptr, ptr %5, align 8
  %173 = getelementptr inbounds nuw %struct.Attention, ptr %172, i32 0, i32 3
  %174 = load ptr, ptr %173, align 8
  %175 = load i64, ptr %23, align 8
  %176 = getelementptr inbounds i32, ptr %174, i64 %175
  %177 = load i32, ptr %176, align 4
  %178 = getelementptr inbounds nuw %struct.Block, ptr %18, i32 0, i32 2
  %179 = load i64, ptr %21, align 8
  %180 = getelementptr inbounds [16 x i32], ptr %178, i64 0, i64 %179
  store i32 %177, ptr %180, align 4
  %181 = load ptr, ptr %5, align 8
  %182 = getelementptr inbounds nuw %struct.Attention, ptr %181, i32 0, i32 4
  %183 = load ptr, ptr %182, align 8
  %184 = load i64, ptr %23, align 8
  %185 = getelementptr inbounds i32, ptr %183, i64 %184
  %186 = load i32, ptr %185, align 4
  %187 = getelementptr inbounds nuw %struct.Block, ptr %18, i32 0, i32 3
  %188 = load i64, ptr %21, align 8
  %189 = getelementptr inbounds [16 x i32], ptr %187, i64 0, i64 %188
  store i32 %186, ptr %189, align 4
  %190 = load i64, ptr %19, align 8
  %191 = getelementptr inbounds nuw %struct.Block, ptr %18, i32 0, i32 2
  %192 = load i64, ptr %21, align 8
  %193 = getelementptr inbounds [16 x i32], ptr %191, i64 0, i64 %192
  %194 = load i32, ptr %193, align 4
  %195 = sext i32 %194 to i64
  %196 = call i64 @min_of(i64 noundef %190, i64 noundef %195)
  store i64 %196, ptr %19, align 8
  %197 = load i64, ptr %20, align 8
  %198 = getelementptr inbounds nuw %struct.Block, ptr %18, i32 0, i32 3
  %199 = load i64, ptr %21, align 8
  %200 = getelementptr inbounds [16 x i32], ptr %198, i64 0, i64 %199
  %201 = load i32, ptr %200, align 4
  %202 = sext i32 %201 to i64
  %203 = call i64 @max_of(i64 noundef %197, i64 noundef %202)
  store i64 %203, ptr %20, align 8
  %204 = getelementptr inbounds nuw %struct.Block, ptr %18, i32 0, i32 1
  %205 = load ptr, ptr %204, align 8
  %206 = load i64, ptr %21, align 8
  %207 = load i64, ptr @head_dim, align 8
  %208 = add nsw i64 %207, 2
  %209 = mul nsw i64 %206, %208
  %210 = getelementptr inbounds float, ptr %205, i64 %209
  store ptr %210, ptr %24, align 8
  store i64 0, ptr %25, align 8
  br label %211

211:
  %212 = load i64, ptr %25, align 8
  %213 = load i64, ptr @head_dim, align 8
  %214 = icmp slt i64 %212, %213
  br i1 %214, label %216, label %215

215:
  store i32 8, ptr %17, align 4
  br label %236

216:
  %217 = load ptr, ptr %5, align 8
  %218 = getelementptr inbounds nuw %struct.Attention, ptr %217, i32 0, i32 0
  %219 = load ptr, ptr %218, align 8
  %220 = load i64, ptr %22, align 8
  %221 = load i64, ptr %25, align 8
  %222 = add nsw i64 %220, %221
  %223 = getelementptr inbounds float, ptr %219, i64 %222
  %224 = load float, ptr %223, align 4
  %225 = load float, ptr %13, align 4
  %226 = fmul float %224, %225
  %227 = load i64, ptr %21, align 8
  %228 = load i64, ptr @head_dim, align 8
  %229 = mul nsw i64 %227, %228
  %230 = load i64, ptr %25, align 8
  %231 = add nsw i64 %229, %230
  %232 = getelementptr inbounds float, ptr %103, i64 %231
  store float %226, ptr %232, align 4
  br label %233

233:
  %234 = load i64, ptr %25, align 8
  %235 = add nsw i64 %234, 1
  store i64 %235, ptr %25, align 8
  br label %211, !llvm.loop !46

236:
  store i64 0, ptr %26, align 8
  br label %237

237:
  %238 = load i64, ptr %26, align 8
  %239 = load i64, ptr @head_dim, align 8
  %240 = add nsw i64 %239, 2
  %241 = icmp slt i64 %238, %240
  br i1 %241, label %243, label %242

242:
  store i32 11, ptr %17, align 4
  br label %255

243:
  %244 = load i64, ptr %26, align 8
  %245 = load i64, ptr @head_dim, align 8
  %246 = icmp eq i64 %244, %245
  %247 = zext i1 %246 to i64
  %248 = select i1 %246, float 0xC6293E5940000000, float 0.000000e+00
  %249 = load ptr, ptr %24, align 8
  %250 = load i64, ptr %26, align 8
  %251 = getelementptr inbounds float, ptr %249, i64 %250
  store float %248, ptr %251, align 4
  br label %252

252:
  %253 = load i64, ptr %26, align 8
  %254 = add nsw i64 %253, 1
  store i64 %254, ptr %26, align 8
  br label %237, !llvm.loop !47

255:
  br label %256

256:
  %257 = load i64, ptr %21, align 8
  %258 = add nsw i64 %257, 1
  store i64 %258, ptr %21, align 8
  br label %148, !llvm.loop !48

259:
  %260 = load i64, ptr %10, align 8
  %261 = load i64, ptr %19, align 8
  %262 = and i64 %261, -256
  %263 = call i64 @max_of(i64 noundef %260, i64 noundef %262)
  store i64 %263, ptr %27, align 8
  br label %264

264:
  %265 = load i64, ptr %27, align 8
  %266 = load i64, ptr %11, align 8
  %267 = load i64, ptr %20, align 8
  %268 = add nsw i64 %267, 1
  %269 = call i64 @min_of(i64 noundef %266, i64 noundef %268)
  %270 = icmp slt i64 %265, %269
  br i1 %270, label %272, label %271

271:
  store i32 14, ptr %17, align 4
  br label %312

272:
  %273 = load i64, ptr %11, align 8
  %274 = load i64, ptr %20, align 8
  %275 = add nsw i64 %274, 1
  %276 = call i64 @min_of(i64 noundef %273, i64 noundef %275)
  %277 = load i64, ptr %27, align 8
  %278 = sub nsw i64 %276, %277
  %279 = add nsw i64 %278, 16
  %280 = sub nsw i64 %279, 1
  %281 = and i64 %280, -16
  store i64 %281, ptr %28, align 8
  %282 = load ptr, ptr %5, align 8
  %283 = load i64, ptr %7, align 8
  %284 = load i64, ptr %27, align 8
  %285 = call i64 @cached(ptr noundef %282, i64 noundef %283, i64 noundef %284)
  store i64 %285, ptr %29, align 8
  %286 = load i64, ptr %28, align 8
  %287 = call i64 @min_of(i64 noundef %286, i64 noundef 256)
  %288 = load ptr, ptr %5, align 8
  %289 = getelementptr inbounds nuw %struct.Attention, ptr %288, i32 0, i32 12
  %290 = load i64, ptr %289, align 8
  %291 = load i64, ptr %27, align 8
  %292 = sub nsw i64 %290, %291
  %293 = call i64 @min_of(i64 noundef %287, i64 noundef %292)
  store i64 %293, ptr %30, align 8
  %294 = load ptr, ptr %5, align 8
  %295 = getelementptr inbounds nuw %struct.Attention, ptr %294, i32 0, i32 1
  %296 = load ptr, ptr %295, align 8
  %297 = load i64, ptr %29, align 8
  %298 = load i32, ptr %6, align 4
  %299 = call ptr @element(ptr noundef %296, i64 noundef %297, i32 noundef %298)
  %300 = load ptr, ptr %5, align 8
  %301 = getelementptr inbounds nuw %struct.Attention, ptr %300, i32 0, i32 2
  %302 = load ptr, ptr %301, align 8
  %303 = load i64, ptr %29, align 8
  %304 = load i32, ptr %6, align 4
  %305 = call ptr @element(ptr noundef %302, i64 noundef %303, i32 noundef %304)
  %306 = load i64, ptr %27, align 8
  %307 = load i64, ptr %30, align 8
  %308 = load i32, ptr %6, align 4
  call void @attend_chunk(ptr noundef %18, ptr noundef %299, ptr noundef %305, i64 noundef %306, i64 noundef %307, i32 noundef %308)
  br label %309

309:
  %310 = load i64, ptr %27, align 8
  %311 = add nsw i64 %310, 256
  store i64 %311, ptr %27, align 8
  br label %264, !llvm.loop !49

312:
  br label %313

313:
  %314 = load i64, ptr %16, align 8
  %315 = add nsw i64 %314, 16
  store i64 %315, ptr %16, align 8
  br label %109, !llvm.loop !50

316:
  %317 = load ptr, ptr %14, align 8
  call void @llvm.stackrestore.p0(ptr %317)
  ret void
}

define internal i64 @cached(ptr noundef %0, i64 noundef %1, i64 noundef %2) #1 {
  %4 = alloca ptr, align 8
  %5 = alloca i64, align 8
  %6 = alloca i64, align 8
  store ptr %0, ptr %4, align 8
  store i64 %1, ptr %5, align 8
  store i64 %2, ptr %6, align 8
  %7 = load i64, ptr %5, align 8
  %8 = load ptr, ptr %4, align 8
  %9 = getelementptr inbounds nuw %struct.Attention, ptr %8, i32 0, i32 7
  %10 = load i64, ptr %9, align 8
  %11 = sdiv i64 %7, %10
  %12 = load ptr, ptr %4, align 8
  %13 = getelementptr inbounds nuw %struct.Attention, ptr %12, i32 0, i32 8
  %14 = load i64, ptr %13, align 8
  %15 = mul nsw i64 %11, %14
  %16 = load ptr, ptr %4, align 8
  %17 = getelementptr inbounds nuw %struct.Attention, ptr %16, i32 0, i32 9
  %18 = load i64, ptr %17, align 8
  %19 = add nsw i64 %15, %18
  %20 = load i64, ptr %5, align 8
  %21 = load ptr, ptr %4, align 8
  %22 = getelementptr inbounds nuw %struct.Attention, ptr %21, i32 0, i32 7
  %23 = load i64, ptr %22, align 8
  %24 = srem i64 %20, %23
  %25 = add nsw i64 %19, %24
  %26 = load ptr, ptr %4, align 8
  %27 = getelementptr inbounds nuw %struct.Attention, ptr %26, i32 0, i32 12
  %28 = load i64, ptr %27, align 8
  %29 = mul nsw i64 %25, %28
  %30 = load i64, ptr %6, align 8
  %31 = add nsw i64 %29, %30
  %32 = load i64, ptr @head_dim, align 8
  %33 = mul nsw i64 %31, %32
  ret i64 %33
}

define internal void @attend_chunk(ptr noundef %0, ptr noundef %1, ptr noundef %2, i64 noundef %3, i64 noundef %4, i32 noundef %5) #11 {
  %7 = alloca ptr, align 8
  %8 = alloca ptr, align 8
  %9 = alloca ptr, align 8
  %10 = alloca i64, align 8
  %11 = alloca i64, align 8
  %12 = alloca i32, align 4
  %13 = alloca i64, align 8
  %14 = alloca [4096 x float], align 64
  %15 = alloca i64, align 8
  %16 = alloca i64, align 8
  %17 = alloca i32, align 4
  %18 = alloca ptr, align 8
  %19 = alloca ptr, align 8
  %20 = alloca float, align 4
  %21 = alloca float, align 4
  %22 = alloca float, align 4
  %23 = alloca i64, align 8
  %24 = alloca i64, align 8
  store ptr %0, ptr %7, align 8
  store ptr %1, ptr %8, align 8
  store ptr %2, ptr %9, align 8
  store i64 %3, ptr %10, align 8
  store i64 %4, ptr %11, align 8
  store i32 %5, ptr %12, align 4
  %25 = load i64, ptr @head_dim, align 8
  %26 = add nsw i64 %25, 2
  store i64 %26, ptr %13, align 8
  store i64 0, ptr %15, align 8
  br label %27

27:
  %28 = load i64, ptr %15, align 8
  %29 = load ptr, ptr %7, align 8
  %30 = getelementptr inbounds nuw %struct.Block, ptr %29, i32 0, i32 4
  %31 = load i64, ptr %30, align 8
  %32 = icmp slt i64 %28, %31
  br i1 %32, label %34, label %33

33:
  br label %109

34:
  %35 = load ptr, ptr %7, align 8
  %36 = getelementptr inbounds nuw %struct.Block, ptr %35, i32 0, i32 4
  %37 = load i64, ptr %36, align 8
  %38 = load i64, ptr %15, align 8
  %39 = sub nsw i64 %37, %38
  %40 = call i64 @min_of(i64 noundef %39, i64 noundef 4)
  switch i64 %40, label %105 [
    i64 1, label %41
    i64 2, label %56
    i64 3, label %71
    i64 4, label %86
    i64 5, label %101
    i64 6, label %102
    i64 7, label %103
    i64 8, label %104
  ]

41:
  %42 = load ptr, ptr %7, align 8
  %43 = getelementptr inbounds nuw %struct.Block, ptr %42, i32 0, i32 0
  %44 = load ptr, ptr %43, align 8
  %45 = load i64, ptr %15, align 8
  %46 = load i64, ptr @head_dim, align 8
  %47 = mul nsw i64 %45, %46
  %48 = getelementptr inbounds float, ptr %44, i64 %47
  %49 = load ptr, ptr %8, align 8
  %50 = getelementptr inbounds [4096 x float], ptr %14, i64 0, i64 0
  %51 = load i64, ptr %15, align 8
  %52 = mul nsw i64 %51, 256
  %53 = getelementptr inbounds float, ptr %50, i64 %52
  %54 = load i64, ptr %11, align 8
  %55 = load i32, ptr %12, align 4
  call void @scores(ptr noundef %48, ptr noundef %49, ptr noundef %53, i64 noundef %54, i32 noundef 1, i32 noundef %55)
  br label %105

56:
  %57 = load ptr, ptr %7, align 8
  %58 = getelementptr inbounds nuw %struct.Block, ptr %57, i32 0, i32 0
  %59 = load ptr, ptr %58, align 8
  %60 = load i64, ptr %15, align 8
  %61 = load i64, ptr @head_dim, align 8
  %62 = mul nsw i64 %60, %61
  %63 = getelementptr inbounds float, ptr %59, i64 %62
  %64 = load ptr, ptr %8, align 8
  %65 = getelementptr inbounds [4096 x float], ptr %14, i64 0, i64 0
  %66 = load i64, ptr %15, align 8
  %67 = mul nsw i64 %66, 256
  %68 = getelementptr inbounds float, ptr %65, i64 %67
  %69 = load i64, ptr %11, align 8
  %70 = load i32, ptr %12, align 4
  call void @scores(ptr noundef %63, ptr noundef %64, ptr noundef %68, i64 noundef %69, i32 noundef 2, i32 noundef %70)
  br label %105

71:
  %72 = load ptr, ptr %7, align 8
  %73 = getelementptr inbounds nuw %struct.Block, ptr %72, i32 0, i32 0
  %74 = load ptr, ptr %73, align 8
  %75 = load i64, ptr %15, align 8
  %76 = load i64, ptr @head_dim, align 8
  %77 = mul nsw i64 %75, %76
  %78 = getelementptr inbounds float, ptr %74, i64 %77
  %79 = load ptr, ptr %8, align 8
  %80 = getelementptr inbounds [4096 x float], ptr %14, i64 0, i64 0
  %81 = load i64, ptr %15, align 8
  %82 = mul nsw i64 %81, 256
  %83 = getelementptr inbounds float, ptr %80, i64 %82
  %84 = load i64, ptr %11, align 8
  %85 = load i32, ptr %12, align 4
  call void @scores(ptr noundef %78, ptr noundef %79, ptr noundef %83, i64 noundef %84, i32 noundef 3, i32 noundef %85)
  br label %105

86:
  %87 = load ptr, ptr %7, align 8
  %88 = getelementptr inbounds nuw %struct.Block, ptr %87, i32 0, i32 0
  %89 = load ptr, ptr %88, align 8
  %90 = load i64, ptr %15, align 8
  %91 = load i64, ptr @head_dim, align 8
  %92 = mul nsw i64 %90, %91
  %93 = getelementptr inbounds float, ptr %89, i64 %92
  %94 = load ptr, ptr %8, align 8
  %95 = getelementptr inbounds [4096 x float], ptr %14, i64 0, i64 0
  %96 = load i64, ptr %15, align 8
  %97 = mul nsw i64 %96, 256
  %98 = getelementptr inbounds float, ptr %95, i64 %97
  %99 = load i64, ptr %11, align 8
  %100 = load i32, ptr %12, align 4
  call void @scores(ptr noundef %93, ptr noundef %94, ptr noundef %98, i64 noundef %99, i32 noundef 4, i32 noundef %100)
  br label %105

101:
  br label %105

102:
  br label %105

103:
  br label %105

104:
  br label %105

105:
  br label %106

106:
  %107 = load i64, ptr %15, align 8
  %108 = add nsw i64 %107, 4
  store i64 %108, ptr %15, align 8
  br label %27, !llvm.loop !51

109:
  store i64 0, ptr %16, align 8
  br label %110

110:
  %111 = load i64, ptr %16, align 8
  %112 = load ptr, ptr %7, align 8
  %113 = getelementptr inbounds nuw %struct.Block, ptr %112, i32 0, i32 4
  %114 = load i64, ptr %113, align 8
  %115 = icmp slt i64 %111, %114
  br i1 %115, label %117, label %116

116:
  store i32 6, ptr %17, align 4
  br label %184

117:
  %118 = load ptr, ptr %7, align 8
  %119 = getelementptr inbounds nuw %struct.Block, ptr %118, i32 0, i32 1
  %120 = load ptr, ptr %119, align 8
  %121 = load i64, ptr %16, align 8
  %122 = load i64, ptr %13, align 8
  %123 = mul nsw i64 %121, %122
  %124 = getelementptr inbounds float, ptr %120, i64 %123
  store ptr %124, ptr %18, align 8
  %125 = load ptr, ptr %18, align 8
  %126 = load i64, ptr @head_dim, align 8
  %127 = getelementptr inbounds float, ptr %125, i64 %126
  store ptr %127, ptr %19, align 8
  %128 = load ptr, ptr %19, align 8
  %129 = load float, ptr %128, align 4
  store float %129, ptr %21, align 4
  %130 = getelementptr inbounds [4096 x float], ptr %14, i64 0, i64 0
  %131 = load i64, ptr %16, align 8
  %132 = mul nsw i64 %131, 256
  %133 = getelementptr inbounds float, ptr %130, i64 %132
  %134 = load i64, ptr %10, align 8
  %135 = load i64, ptr %11, align 8
  %136 = load ptr, ptr %7, align 8
  %137 = getelementptr inbounds nuw %struct.Block, ptr %136, i32 0, i32 2
  %138 = load i64, ptr %16, align 8
  %139 = getelementptr inbounds [16 x i32], ptr %137, i64 0, i64 %138
  %140 = load i32, ptr %139, align 4
  %141 = load ptr, ptr %7, align 8
  %142 = getelementptr inbounds nuw %struct.Block, ptr %141, i32 0, i32 3
  %143 = load i64, ptr %16, align 8
  %144 = getelementptr inbounds [16 x i32], ptr %142, i64 0, i64 %143
  %145 = load i32, ptr %144, align 4
  %146 = load float, ptr %21, align 4
  %147 = call float @softmax_weights(ptr noundef %133, i64 noundef %134, i64 noundef %135, i32 noundef %140, i32 noundef %145, float noundef %146, ptr noundef %20)
  %148 = load ptr, ptr %19, align 8
  store float %147, ptr %148, align 4
  %149 = load float, ptr %21, align 4
  %150 = load ptr, ptr %19, align 8
  %151 = load float, ptr %150, align 4
  %152 = fsub float %149, %151
  %153 = insertelement <16 x float> poison, float %152, i64 0
  %154 = shufflevector <16 x float> %153, <16 x float> poison, <16 x i32> zeroinitializer
  %155 = call <16 x float> @exponential(<16 x float> noundef %154)
  %156 = extractelement <16 x float> %155, i32 0
  store float %156, ptr %22, align 4
  %157 = load ptr, ptr %19, align 8
  %158 = getelementptr inbounds float, ptr %157, i64 1
  %159 = load float, ptr %158, align 4
  %160 = load float, ptr %22, align 4
  %161 = load float, ptr %20, align 4
  %162 = call float @llvm.fma.f32(float %159, float %160, float %161)
  %163 = load ptr, ptr %19, align 8
  %164 = getelementptr inbounds float, ptr %163, i64 1
  store float %162, ptr %164, align 4
  store i64 0, ptr %23, align 8
  br label %165

165:
  %166 = load i64, ptr %23, align 8
  %167 = load i64, ptr @head_dim, align 8
  %168 = icmp slt i64 %166, %167
  br i1 %168, label %170, label %169

169:
  store i32 9, ptr %17, align 4
  br label %180

170:
  %171 = load float, ptr %22, align 4
  %172 = load ptr, ptr %18, align 8
  %173 = load i64, ptr %23, align 8
  %174 = getelementptr inbounds float, ptr %172, i64 %173
  %175 = load float, ptr %174, align 4
  %176 = fmul float %175, %171
  store float %176, ptr %174, align 4
  br label %177

177:
  %178 = load i64, ptr %23, align 8
  %179 = add nsw i64 %178, 1
  store i64 %179, ptr %23, align 8
  br label %165, !llvm.loop !52

180:
  br label %181

181:
  %182 = load i64, ptr %16, align 8
  %183 = add nsw i64 %182, 1
  store i64 %183, ptr %16, align 8
  br label %110, !llvm.loop !53

184:
  store i64 0, ptr %24, align 8
  br label %185

185:
  %186 = load i64, ptr %24, align 8
  %187 = load ptr, ptr %7, align 8
  %188 = getelementptr inbounds nuw %struct.Block, ptr %187, i32 0, i32 4
  %189 = load i64, ptr %188, align 8
  %190 = icmp slt i64 %186, %189
  br i1 %190, label %192, label %191

191:
  store i32 12, ptr %17, align 4
  br label %267

192:
  %193 = load ptr, ptr %7, align 8
  %194 = getelementptr inbounds nuw %struct.Block, ptr %193, i32 0, i32 4
  %195 = load i64, ptr %194, align 8
  %196 = load i64, ptr %24, align 8
  %197 = sub nsw i64 %195, %196
  %198 = call i64 @min_of(i64 noundef %197, i64 noundef 4)
  switch i64 %198, label %263 [
    i64 1, label %199
    i64 2, label %214
    i64 3, label %229
    i64 4, label %244
    i64 5, label %259
    i64 6, label %260
    i64 7, label %261
    i64 8, label %262
  ]

199:
  %200 = getelementptr inbounds [4096 x float], ptr %14, i64 0, i64 0
  %201 = load i64, ptr %24, align 8
  %202 = mul nsw i64 %201, 256
  %203 = getelementptr inbounds float, ptr %200, i64 %202
  %204 = load ptr, ptr %9, align 8
  %205 = load ptr, ptr %7, align 8
  %206 = getelementptr inbounds nuw %struct.Block, ptr %205, i32 0, i32 1
  %207 = load ptr, ptr %206, align 8
  %208 = load i64, ptr %24, align 8
  %209 = load i64, ptr %13, align 8
  %210 = mul nsw i64 %208, %209
  %211 = getelementptr inbounds float, ptr %207, i64 %210
  %212 = load i64, ptr %11, align 8
  %213 = load i32, ptr %12, align 4
  call void @mix(ptr noundef %203, ptr noundef %204, ptr noundef %211, i64 noundef %212, i32 noundef 1, i32 noundef %213)
  br label %263

214:
  %215 = getelementptr inbounds [4096 x float], ptr %14, i64 0, i64 0
  %216 = load i64, ptr %24, align 8
  %217 = mul nsw i64 %216, 256
  %218 = getelementptr inbounds float, ptr %215, i64 %217
  %219 = load ptr, ptr %9, align 8
  %220 = load ptr, ptr %7, align 8
  %221 = getelementptr inbounds nuw %struct.Block, ptr %220, i32 0, i32 1
  %222 = load ptr, ptr %221, align 8
  %223 = load i64, ptr %24, align 8
  %224 = load i64, ptr %13, align 8
  %225 = mul nsw i64 %223, %224
  %226 = getelementptr inbounds float, ptr %222, i64 %225
  %227 = load i64, ptr %11, align 8
  %228 = load i32, ptr %12, align 4
  call void @mix(ptr noundef %218, ptr noundef %219, ptr noundef %226, i64 noundef %227, i32 noundef 2, i32 noundef %228)
  br label %263

229:
  %230 = getelementptr inbounds [4096 x float], ptr %14, i64 0, i64 0
  %231 = load i64, ptr %24, align 8
  %232 = mul nsw i64 %231, 256
  %233 = getelementptr inbounds float, ptr %230, i64 %232
  %234 = load ptr, ptr %9, align 8
  %235 = load ptr, ptr %7, align 8
  %236 = getelementptr inbounds nuw %struct.Block, ptr %235, i32 0, i32 1
  %237 = load ptr, ptr %236, align 8
  %238 = load i64, ptr %24, align 8
  %239 = load i64, ptr %13, align 8
  %240 = mul nsw i64 %238, %239
  %241 = getelementptr inbounds float, ptr %237, i64 %240
  %242 = load i64, ptr %11, align 8
  %243 = load i32, ptr %12, align 4
  call void @mix(ptr noundef %233, ptr noundef %234, ptr noundef %241, i64 noundef %242, i32 noundef 3, i32 noundef %243)
  br label %263

244:
  %245 = getelementptr inbounds [4096 x float], ptr %14, i64 0, i64 0
  %246 = load i64, ptr %24, align 8
  %247 = mul nsw i64 %246, 256
  %248 = getelementptr inbounds float, ptr %245, i64 %247
  %249 = load ptr, ptr %9, align 8
  %250 = load ptr, ptr %7, align 8
  %251 = getelementptr inbounds nuw %struct.Block, ptr %250, i32 0, i32 1
  %252 = load ptr, ptr %251, align 8
  %253 = load i64, ptr %24, align 8
  %254 = load i64, ptr %13, align 8
  %255 = mul nsw i64 %253, %254
  %256 = getelementptr inbounds float, ptr %252, i64 %255
  %257 = load i64, ptr %11, align 8
  %258 = load i32, ptr %12, align 4
  call void @mix(ptr noundef %248, ptr noundef %249, ptr noundef %256, i64 noundef %257, i32 noundef 4, i32 noundef %258)
  br label %263

259:
  br label %263

260:
  br label %263

261:
  br label %263

262:
  br label %263

263:
  br label %264

264:
  %265 = load i64, ptr %24, align 8
  %266 = add nsw i64 %265, 4
  store i64 %266, ptr %24, align 8
  br label %185, !llvm.loop !54

267:
  ret void
}

define internal void @scores(ptr noundef %0, ptr noundef %1, ptr noundef %2, i64 noundef %3, i32 noundef %4, i32 noundef %5) #1 {
  %7 = alloca ptr, align 8
  %8 = alloca ptr, align 8
  %9 = alloca ptr, align 8
  %10 = alloca i64, align 8
  %11 = alloca i32, align 4
  %12 = alloca i32, align 4
  %13 = alloca i64, align 8
  store ptr %0, ptr %7, align 8
  store ptr %1, ptr %8, align 8
  store ptr %2, ptr %9, align 8
  store i64 %3, ptr %10, align 8
  store i32 %4, ptr %11, align 4
  store i32 %5, ptr %12, align 4
  store i64 0, ptr %13, align 8
  br label %14

14:
  %15 = load i64, ptr %13, align 8
  %16 = load i64, ptr %10, align 8
  %17 = icmp slt i64 %15, %16
  br i1 %17, label %19, label %18

18:
  br label %36

19:
  %20 = load ptr, ptr %7, align 8
  %21 = load ptr, ptr %8, align 8
  %22 = load i64, ptr %13, align 8
  %23 = load i64, ptr @head_dim, align 8
  %24 = mul nsw i64 %22, %23
  %25 = load i32, ptr %12, align 4
  %26 = call ptr @element(ptr noundef %21, i64 noundef %24, i32 noundef %25)
  %27 = load ptr, ptr %9, align 8
  %28 = load i64, ptr %13, align 8
  %29 = getelementptr inbounds float, ptr %27, i64 %28
  %30 = load i64, ptr @head_dim, align 8
  %31 = load i32, ptr %11, align 4
  %32 = load i32, ptr %12, align 4
  call void @tile(ptr noundef %20, ptr noundef %26, ptr noundef %29, i64 noundef %30, i64 noundef 256, i32 noundef %31, i32 noundef 4, i32 noundef %32)
  br label %33

33:
  %34 = load i64, ptr %13, align 8
  %35 = add nsw i64 %34, 4
  store i64 %35, ptr %13, align 8
  br label %14, !llvm.loop !55

36:
  ret void
}

define internal float @softmax_weights(ptr noundef %0, i64 noundef %1, i64 noundef %2, i32 noundef %3, i32 noundef %4, float noundef %5, ptr noundef %6) #11 {
  %8 = alloca ptr, align 8
  %9 = alloca i64, align 8
  %10 = alloca i64, align 8
  %11 = alloca i32, align 4
  %12 = alloca i32, align 4
  %13 = alloca float, align 4
  %14 = alloca ptr, align 8
  %15 = alloca <16 x i32>, align 64
  %16 = alloca i32, align 4
  %17 = alloca <16 x float>, align 64
  %18 = alloca <16 x float>, align 64
  %19 = alloca i64, align 8
  %20 = alloca <16 x i32>, align 64
  %21 = alloca <16 x i32>, align 64
  %22 = alloca float, align 4
  %23 = alloca i64, align 8
  %24 = alloca <16 x i32>, align 64
  %25 = alloca <16 x i32>, align 64
  %26 = alloca <16 x float>, align 64
  %27 = alloca <16 x float>, align 64
  store ptr %0, ptr %8, align 8
  store i64 %1, ptr %9, align 8
  store i64 %2, ptr %10, align 8
  store i32 %3, ptr %11, align 4
  store i32 %4, ptr %12, align 4
  store float %5, ptr %13, align 4
  store ptr %6, ptr %14, align 8
  store i32 0, ptr %16, align 4
  br label %28

28:
  %29 = load i32, ptr %16, align 4
  %30 = icmp slt i32 %29, 16
  br i1 %30, label %32, label %31

31:
  br label %40

32:
  %33 = load i32, ptr %16, align 4
  %34 = load i32, ptr %16, align 4
  %35 = load <16 x i32>, ptr %15, align 64
  %36 = insertelement <16 x i32> %35, i32 %33, i32 %34
  store <16 x i32> %36, ptr %15, align 64
  br label %37

37:
  %38 = load i32, ptr %16, align 4
  %39 = add nsw i32 %38, 1
  store i32 %39, ptr %16, align 4
  br label %28, !llvm.loop !56

40:
  %41 = load float, ptr %13, align 4
  %42 = insertelement <16 x float> poison, float %41, i64 0
  %43 = shufflevector <16 x float> %42, <16 x float> poison, <16 x i32> zeroinitializer
  store <16 x float> %43, ptr %17, align 64
  store <16 x float> zeroinitializer, ptr %18, align 64
  store i64 0, ptr %19, align 8
  br label %44

44:
  %45 = load i64, ptr %19, align 8
  %46 = load i64, ptr %10, align 8
  %47 = icmp slt i64 %45, %46
  br i1 %47, label %49, label %48

48:
  br label %83

49:
  %50 = load <16 x i32>, ptr %15, align 64
  %51 = load i64, ptr %9, align 8
  %52 = load i64, ptr %19, align 8
  %53 = add nsw i64 %51, %52
  %54 = trunc i64 %53 to i32
  %55 = insertelement <16 x i32> poison, i32 %54, i64 0
  %56 = shufflevector <16 x i32> %55, <16 x i32> poison, <16 x i32> zeroinitializer
  %57 = add <16 x i32> %50, %56
  store <16 x i32> %57, ptr %20, align 64
  %58 = load <16 x i32>, ptr %20, align 64
  %59 = load i32, ptr %11, align 4
  %60 = insertelement <16 x i32> poison, i32 %59, i64 0
  %61 = shufflevector <16 x i32> %60, <16 x i32> poison, <16 x i32> zeroinitializer
  %62 = icmp sge <16 x i32> %58, %61
  %63 = sext <16 x i1> %62 to <16 x i32>
  %64 = load <16 x i32>, ptr %20, align 64
  %65 = load i32, ptr %12, align 4
  %66 = insertelement <16 x i32> poison, i32 %65, i64 0
  %67 = shufflevector <16 x i32> %66, <16 x i32> poison, <16 x i32> zeroinitializer
  %68 = icmp sle <16 x i32> %64, %67
  %69 = sext <16 x i1> %68 to <16 x i32>
  %70 = and <16 x i32> %63, %69
  store <16 x i32> %70, ptr %21, align 64
  %71 = load <16 x float>, ptr %17, align 64
  %72 = load <16 x i32>, ptr %21, align 64
  %73 = load ptr, ptr %8, align 8
  %74 = load i64, ptr %19, align 8
  %75 = getelementptr inbounds float, ptr %73, i64 %74
  %76 = call <16 x float> @load(ptr noundef %75, i32 noundef 0)
  %77 = icmp slt <16 x i32> %72, zeroinitializer
  %78 = select <16 x i1> %77, <16 x float> %76, <16 x float> splat (float 0xC6293E5940000000)
  %79 = call <16 x float> @larger(<16 x float> noundef %71, <16 x float> noundef %78)
  store <16 x float> %79, ptr %17, align 64
  br label %80

80:
  %81 = load i64, ptr %19, align 8
  %82 = add nsw i64 %81, 16
  store i64 %82, ptr %19, align 8
  br label %44, !llvm.loop !57

83:
  %84 = load <16 x float>, ptr %17, align 64
  %85 = call float @largest(<16 x float> noundef %84)
  store float %85, ptr %22, align 4
  store i64 0, ptr %23, align 8
  br label %86

86:
  %87 = load i64, ptr %23, align 8
  %88 = load i64, ptr %10, align 8
  %89 = icmp slt i64 %87, %88
  br i1 %89, label %91, label %90

90:
  br label %140

91:
  %92 = load <16 x i32>, ptr %15, align 64
  %93 = load i64, ptr %9, align 8
  %94 = load i64, ptr %23, align 8
  %95 = add nsw i64 %93, %94
  %96 = trunc i64 %95 to i32
  %97 = insertelement <16 x i32> poison, i32 %96, i64 0
  %98 = shufflevector <16 x i32> %97, <16 x i32> poison, <16 x i32> zeroinitializer
  %99 = add <16 x i32> %92, %98
  store <16 x i32> %99, ptr %24, align 64
  %100 = load <16 x i32>, ptr %24, align 64
  %101 = load i32, ptr %11, align 4
  %102 = insertelement <16 x i32> poison, i32 %101, i64 0
  %103 = shufflevector <16 x i32> %102, <16 x i32> poison, <16 x i32> zeroinitializer
  %104 = icmp sge <16 x i32> %100, %103
  %105 = sext <16 x i1> %104 to <16 x i32>
  %106 = load <16 x i32>, ptr %24, align 64
  %107 = load i32, ptr %12, align 4
  %108 = insertelement <16 x i32> poison, i32 %107, i64 0
  %109 = shufflevector <16 x i32> %108, <16 x i32> poison, <16 x i32> zeroinitializer
  %110 = icmp sle <16 x i32> %106, %109
  %111 = sext <16 x i1> %110 to <16 x i32>
  %112 = and <16 x i32> %105, %111
  store <16 x i32> %112, ptr %25, align 64
  %113 = load ptr, ptr %8, align 8
  %114 = load i64, ptr %23, align 8
  %115 = getelementptr inbounds float, ptr %113, i64 %114
  %116 = call <16 x float> @load(ptr noundef %115, i32 noundef 0)
  store <16 x float> %116, ptr %26, align 64
  %117 = load <16 x i32>, ptr %25, align 64
  %118 = load <16 x float>, ptr %26, align 64
  %119 = load float, ptr %22, align 4
  %120 = insertelement <16 x float> poison, float %119, i64 0
  %121 = shufflevector <16 x float> %120, <16 x float> poison, <16 x i32> zeroinitializer
  %122 = fsub <16 x float> %118, %121
  %123 = call <16 x float> @exponential(<16 x float> noundef %122)
  %124 = load <16 x float>, ptr %26, align 64
  %125 = load <16 x float>, ptr %26, align 64
  %126 = fsub <16 x float> %124, %125
  %127 = fadd <16 x float> %123, %126
  %128 = icmp slt <16 x i32> %117, zeroinitializer
  %129 = select <16 x i1> %128, <16 x float> %127, <16 x float> zeroinitializer
  store <16 x float> %129, ptr %27, align 64
  %130 = load ptr, ptr %8, align 8
  %131 = load i64, ptr %23, align 8
  %132 = getelementptr inbounds float, ptr %130, i64 %131
  %133 = load <16 x float>, ptr %27, align 64
  call void @store(ptr noundef %132, <16 x float> noundef %133)
  %134 = load <16 x float>, ptr %27, align 64
  %135 = load <16 x float>, ptr %18, align 64
  %136 = fadd <16 x float> %135, %134
  store <16 x float> %136, ptr %18, align 64
  br label %137

137:
  %138 = load i64, ptr %23, align 8
  %139 = add nsw i64 %138, 16
  store i64 %139, ptr %23, align 8
  br label %86, !llvm.loop !58

140:
  %141 = load <16 x float>, ptr %18, align 64
  %142 = call float @sum(<16 x float> noundef %141)
  %143 = load ptr, ptr %14, align 8
  store float %142, ptr %143, align 4
  %144 = load float, ptr %22, align 4
  ret float %144
}

define internal void @mix(ptr noundef %0, ptr noundef %1, ptr noundef %2, i64 noundef %3, i32 noundef %4, i32 noundef %5) #1 {
  %7 = alloca ptr, align 8
  %8 = alloca ptr, align 8
  %9 = alloca ptr, align 8
  %10 = alloca i64, align 8
  %11 = alloca i32, align 4
  %12 = alloca i32, align 4
  %13 = alloca i64, align 8
  store ptr %0, ptr %7, align 8
  store ptr %1, ptr %8, align 8
  store ptr %2, ptr %9, align 8
  store i64 %3, ptr %10, align 8
  store i32 %4, ptr %11, align 4
  store i32 %5, ptr %12, align 4
  store i64 0, ptr %13, align 8
  br label %14

14:
  %15 = load i64, ptr %13, align 8
  %16 = add nsw i64 %15, 64
  %17 = load i64, ptr @head_dim, align 8
  %18 = icmp sle i64 %16, %17
  br i1 %18, label %19, label %34

19:
  %20 = load ptr, ptr %7, align 8
  %21 = load ptr, ptr %8, align 8
  %22 = load i64, ptr %13, align 8
  %23 = load i32, ptr %12, align 4
  %24 = call ptr @element(ptr noundef %21, i64 noundef %22, i32 noundef %23)
  %25 = load ptr, ptr %9, align 8
  %26 = load i64, ptr %13, align 8
  %27 = getelementptr inbounds float, ptr %25, i64 %26
  %28 = load i64, ptr %10, align 8
  %29 = load i32, ptr %11, align 4
  %30 = load i32, ptr %12, align 4
  call void @mix_columns(ptr noundef %20, ptr noundef %24, ptr noundef %27, i64 noundef %28, i64 noundef 64, i32 noundef %29, i32 noundef %30)
  br label %31

31:
  %32 = load i64, ptr %13, align 8
  %33 = add nsw i64 %32, 64
  store i64 %33, ptr %13, align 8
  br label %14, !llvm.loop !59

34:
  br label %35

35:
  %36 = load i64, ptr %13, align 8
  %37 = add nsw i64 %36, 16
  %38 = load i64, ptr @head_dim, align 8
  %39 = icmp sle i64 %37, %38
  br i1 %39, label %40, label %55

40:
  %41 = load ptr, ptr %7, align 8
  %42 = load ptr, ptr %8, align 8
  %43 = load i64, ptr %13, align 8
  %44 = load i32, ptr %12, align 4
  %45 = call ptr @element(ptr noundef %42, i64 noundef %43, i32 noundef %44)
  %46 = load ptr, ptr %9, align 8
  %47 = load i64, ptr %13, align 8
  %48 = getelementptr inbounds float, ptr %46, i64 %47
  %49 = load i64, ptr %10, align 8
  %50 = load i32, ptr %11, align 4
  %51 = load i32, ptr %12, align 4
  call void @mix_columns(ptr noundef %41, ptr noundef %45, ptr noundef %48, i64 noundef %49, i64 noundef 16, i32 noundef %50, i32 noundef %51)
  br label %52

52:
  %53 = load i64, ptr %13, align 8
  %54 = add nsw i64 %53, 16
  store i64 %54, ptr %13, align 8
  br label %35, !llvm.loop !60

55:
  %56 = load i64, ptr %13, align 8
  %57 = load i64, ptr @head_dim, align 8
  %58 = icmp slt i64 %56, %57
  br i1 %58, label %59, label %74

59:
  %60 = load ptr, ptr %7, align 8
  %61 = load ptr, ptr %8, align 8
  %62 = load i64, ptr %13, align 8
  %63 = load i32, ptr %12, align 4
  %64 = call ptr @element(ptr noundef %61, i64 noundef %62, i32 noundef %63)
  %65 = load ptr, ptr %9, align 8
  %66 = load i64, ptr %13, align 8
  %67 = getelementptr inbounds float, ptr %65, i64 %66
  %68 = load i64, ptr %10, align 8
  %69 = load i64, ptr @head_dim, align 8
  %70 = load i64, ptr %13, align 8
  %71 = sub nsw i64 %69, %70
  %72 = load i32, ptr %11, align 4
  %73 = load i32, ptr %12, align 4
  call void @mix_columns(ptr noundef %60, ptr noundef %64, ptr noundef %67, i64 noundef %68, i64 noundef %71, i32 noundef %72, i32 noundef %73)
  br label %74

74:
  ret void
}

define internal float @largest(<16 x float> noundef %0) #11 {
  %2 = alloca <16 x float>, align 64
  store <16 x float> %0, ptr %2, align 64
  %3 = load <16 x float>, ptr %2, align 64
  %4 = call float @llvm.vector.reduce.fmax.v16f32(<16 x float> %3)
  ret float %4
}

declare float @llvm.vector.reduce.fmax.v16f32(<16 x float>) #14

define internal void @mix_columns(ptr noundef %0, ptr noundef %1, ptr noundef %2, i64 noundef %3, i64 noundef %4, i32 noundef %5, i32 noundef %6) #11 {
  %8 = alloca ptr, align 8
  %9 = alloca ptr, align 8
  %10 = alloca ptr, align 8
  %11 = alloca i64, align 8
  %12 = alloca i64, align 8
  %13 = alloca i32, align 4
  %14 = alloca i32, align 4
  %15 = alloca i32, align 4
  %16 = alloca [16 x <16 x float>], align 64
  %17 = alloca i32, align 4
  %18 = alloca i64, align 8
  %19 = alloca i32, align 4
  %20 = alloca ptr, align 8
  %21 = alloca i32, align 4
  %22 = alloca <16 x float>, align 64
  %23 = alloca i32, align 4
  %24 = alloca i32, align 4
  store ptr %0, ptr %8, align 8
  store ptr %1, ptr %9, align 8
  store ptr %2, ptr %10, align 8
  store i64 %3, ptr %11, align 8
  store i64 %4, ptr %12, align 8
  store i32 %5, ptr %13, align 4
  store i32 %6, ptr %14, align 4
  %25 = load i64, ptr %12, align 8
  %26 = icmp sgt i64 %25, 16
  %27 = zext i1 %26 to i64
  %28 = select i1 %26, i32 4, i32 1
  store i32 %28, ptr %15, align 4
  store i32 0, ptr %17, align 4
  br label %29

29:
  %30 = load i32, ptr %17, align 4
  %31 = load i32, ptr %13, align 4
  %32 = load i32, ptr %15, align 4
  %33 = mul nsw i32 %31, %32
  %34 = icmp slt i32 %30, %33
  br i1 %34, label %36, label %35

35:
  br label %61

36:
  %37 = load ptr, ptr %10, align 8
  %38 = load i32, ptr %17, align 4
  %39 = load i32, ptr %15, align 4
  %40 = sdiv i32 %38, %39
  %41 = sext i32 %40 to i64
  %42 = load i64, ptr @head_dim, align 8
  %43 = add nsw i64 %42, 2
  %44 = mul nsw i64 %41, %43
  %45 = getelementptr inbounds float, ptr %37, i64 %44
  %46 = load i32, ptr %17, align 4
  %47 = load i32, ptr %15, align 4
  %48 = srem i32 %46, %47
  %49 = mul nsw i32 %48, 16
  %50 = sext i32 %49 to i64
  %51 = getelementptr inbounds float, ptr %45, i64 %50
  %52 = load i64, ptr %12, align 8
  %53 = call i64 @min_of(i64 noundef %52, i64 noundef 16)
  %54 = call <16 x float> @load_some(ptr noundef %51, i64 noundef %53, i32 noundef 0)
  %55 = load i32, ptr %17, align 4
  %56 = sext i32 %55 to i64
  %57 = getelementptr inbounds [16 x <16 x float>], ptr %16, i64 0, i64 %56
  store <16 x float> %54, ptr %57, align 64
  br label %58

58:
  %59 = load i32, ptr %17, align 4
  %60 = add nsw i32 %59, 1
  store i32 %60, ptr %17, align 4
  br label %29, !llvm.loop !61

61:
  store i64 0, ptr %18, align 8
  br label %62

62:
  %63 = load i64, ptr %18, align 8
  %64 = load i64, ptr %11, align 8
  %65 = icmp slt i64 %63, %64
  br i1 %65, label %67, label %66

66:
  store i32 5, ptr %19, align 4
  br label %139

67:
  %68 = load ptr, ptr %9, align 8
  %69 = load i64, ptr %18, align 8
  %70 = load i64, ptr @head_dim, align 8
  %71 = mul nsw i64 %69, %70
  %72 = load i32, ptr %14, align 4
  %73 = call ptr @element(ptr noundef %68, i64 noundef %71, i32 noundef %72)
  store ptr %73, ptr %20, align 8
  %74 = load ptr, ptr %20, align 8
  %75 = load i64, ptr %12, align 8
  %76 = load i32, ptr %14, align 4
  %77 = call i64 @bytes_of(i32 noundef %76)
  %78 = mul nsw i64 %75, %77
  call void @prefetch(ptr noundef %74, i64 noundef %78, i64 noundef 8192)
  store i32 0, ptr %21, align 4
  br label %79

79:
  %80 = load i32, ptr %21, align 4
  %81 = load i32, ptr %15, align 4
  %82 = icmp slt i32 %80, %81
  br i1 %82, label %84, label %83

83:
  store i32 8, ptr %19, align 4
  br label %135

84:
  %85 = load ptr, ptr %20, align 8
  %86 = load i32, ptr %21, align 4
  %87 = mul nsw i32 %86, 16
  %88 = sext i32 %87 to i64
  %89 = load i32, ptr %14, align 4
  %90 = call ptr @element(ptr noundef %85, i64 noundef %88, i32 noundef %89)
  %91 = load i64, ptr %12, align 8
  %92 = call i64 @min_of(i64 noundef %91, i64 noundef 16)
  %93 = load i32, ptr %14, align 4
  %94 = call <16 x float> @load_some(ptr noundef %90, i64 noundef %92, i32 noundef %93)
  store <16 x float> %94, ptr %22, align 64
  store i32 0, ptr %23, align 4
  br label %95

95:
  %96 = load i32, ptr %23, align 4
  %97 = load i32, ptr %13, align 4
  %98 = icmp slt i32 %96, %97
  br i1 %98, label %100, label %99

99:
  store i32 11, ptr %19, align 4
  br label %131

100:
  %101 = load ptr, ptr %8, align 8
  %102 = load i32, ptr %23, align 4
  %103 = mul nsw i32 %102, 256
  %104 = sext i32 %103 to i64
  %105 = load i64, ptr %18, align 8
  %106 = add nsw i64 %104, %105
  %107 = getelementptr inbounds float, ptr %101, i64 %106
  %108 = load float, ptr %107, align 4
  %109 = insertelement <16 x float> poison, float %108, i64 0
  %110 = shufflevector <16 x float> %109, <16 x float> poison, <16 x i32> zeroinitializer
  %111 = load <16 x float>, ptr %22, align 64
  %112 = load i32, ptr %23, align 4
  %113 = load i32, ptr %15, align 4
  %114 = mul nsw i32 %112, %113
  %115 = load i32, ptr %21, align 4
  %116 = add nsw i32 %114, %115
  %117 = sext i32 %116 to i64
  %118 = getelementptr inbounds [16 x <16 x float>], ptr %16, i64 0, i64 %117
  %119 = load <16 x float>, ptr %118, align 64
  %120 = call <16 x float> @fma_(<16 x float> noundef %110, <16 x float> noundef %111, <16 x float> noundef %119)
  %121 = load i32, ptr %23, align 4
  %122 = load i32, ptr %15, align 4
  %123 = mul nsw i32 %121, %122
  %124 = load i32, ptr %21, align 4
  %125 = add nsw i32 %123, %124
  %126 = sext i32 %125 to i64
  %127 = getelementptr inbounds [16 x <16 x float>], ptr %16, i64 0, i64 %126
  store <16 x float> %120, ptr %127, align 64
  br label %128

128:
  %129 = load i32, ptr %23, align 4
  %130 = add nsw i32 %129, 1
  store i32 %130, ptr %23, align 4
  br label %95, !llvm.loop !62

131:
  br label %132

132:
  %133 = load i32, ptr %21, align 4
  %134 = add nsw i32 %133, 1
  store i32 %134, ptr %21, align 4
  br label %79, !llvm.loop !63

135:
  br label %136

136:
  %137 = load i64, ptr %18, align 8
  %138 = add nsw i64 %137, 1
  store i64 %138, ptr %18, align 8
  br label %62, !llvm.loop !64

139:
  store i32 0, ptr %24, align 4
  br label %140

140:
  %141 = load i32, ptr %24, align 4
  %142 = load i32, ptr %13, align 4
  %143 = load i32, ptr %15, align 4
  %144 = mul nsw i32 %142, %143
  %145 = icmp slt i32 %141, %144
  br i1 %145, label %147, label %146

146:
  store i32 14, ptr %19, align 4
  br label %172

147:
  %148 = load ptr, ptr %10, align 8
  %149 = load i32, ptr %24, align 4
  %150 = load i32, ptr %15, align 4
  %151 = sdiv i32 %149, %150
  %152 = sext i32 %151 to i64
  %153 = load i64, ptr @head_dim, align 8
  %154 = add nsw i64 %153, 2
  %155 = mul nsw i64 %152, %154
  %156 = getelementptr inbounds float, ptr %148, i64 %155
  %157 = load i32, ptr %24, align 4
  %158 = load i32, ptr %15, align 4
  %159 = srem i32 %157, %158
  %160 = mul nsw i32 %159, 16
  %161 = sext i32 %160 to i64
  %162 = getelementptr inbounds float, ptr %156, i64 %161
  %163 = load i64, ptr %12, align 8
  %164 = call i64 @min_of(i64 noundef %163, i64 noundef 16)
  %165 = load i32, ptr %24, align 4
  %166 = sext i32 %165 to i64
  %167 = getelementptr inbounds [16 x <16 x float>], ptr %16, i64 0, i64 %166
  %168 = load <16 x float>, ptr %167, align 64
  call void @store_some(ptr noundef %162, i64 noundef %164, <16 x float> noundef %168)
  br label %169

169:
  %170 = load i32, ptr %24, align 4
  %171 = add nsw i32 %170, 1
  store i32 %171, ptr %24, align 4
  br label %140, !llvm.loop !65

172:
  ret void
}

define internal void @store_some(ptr noundef %0, i64 noundef %1, <16 x float> noundef %2) #11 {
  %4 = alloca ptr, align 8
  %5 = alloca i64, align 8
  %6 = alloca <16 x float>, align 64
  store ptr %0, ptr %4, align 8
  store i64 %1, ptr %5, align 8
  store <16 x float> %2, ptr %6, align 64
  %7 = load ptr, ptr %4, align 8
  %8 = load i64, ptr %5, align 8
  %9 = mul nsw i64 %8, 4
  call void @llvm.memcpy.p0.p0.i64(ptr align 4 %7, ptr align 64 %6, i64 %9, i1 false)
  ret void
}

define internal ptr @of_layer(ptr noundef %0, i64 noundef %1, i64 noundef %2) #1 {
  %4 = alloca ptr, align 8
  %5 = alloca i64, align 8
  %6 = alloca i64, align 8
  %7 = alloca i64, align 8
  store ptr %0, ptr %4, align 8
  store i64 %1, ptr %5, align 8
  store i64 %2, ptr %6, align 8
  store i64 1, ptr %7, align 8
  br label %8

8:
  %9 = load i64, ptr %7, align 8
  %10 = load ptr, ptr %4, align 8
  %11 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %10, i32 0, i32 4
  %12 = load i64, ptr %11, align 8
  %13 = icmp slt i64 %9, %12
  br i1 %13, label %15, label %14

14:
  br label %27

15:
  %16 = load ptr, ptr %4, align 8
  %17 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %16, i32 0, i32 5
  %18 = load ptr, ptr %17, align 8
  %19 = load i64, ptr %7, align 8
  %20 = getelementptr inbounds i64, ptr %18, i64 %19
  %21 = load i64, ptr %20, align 8
  %22 = load i64, ptr %6, align 8
  %23 = mul nsw i64 %22, %21
  store i64 %23, ptr %6, align 8
  br label %24

24:
  %25 = load i64, ptr %7, align 8
  %26 = add nsw i64 %25, 1
  store i64 %26, ptr %7, align 8
  br label %8, !llvm.loop !66

27:
  %28 = load ptr, ptr %4, align 8
  %29 = getelementptr inbounds nuw %struct.XLA_FFI_Buffer, ptr %28, i32 0, i32 3
  %30 = load ptr, ptr %29, align 8
  %31 = load i64, ptr %5, align 8
  %32 = load i64, ptr %6, align 8
  %33 = mul nsw i64 %31, %32
  %34 = getelementptr inbounds i8, ptr %30, i64 %33
  ret ptr %34
}

define internal void @round_rows(i64 noundef %0, ptr noundef %1) #3 {
  %3 = alloca i64, align 8
  %4 = alloca ptr, align 8
  %5 = alloca ptr, align 8
  %6 = alloca i64, align 8
  %7 = alloca i64, align 8
  %8 = alloca i64, align 8
  %9 = alloca i32, align 4
  %10 = alloca ptr, align 8
  %11 = alloca <16 x float>, align 64
  %12 = alloca [16 x <16 x float>], align 64
  %13 = alloca i32, align 4
  %14 = alloca i32, align 4
  %15 = alloca <16 x float>, align 64
  %16 = alloca float, align 4
  %17 = alloca float, align 4
  %18 = alloca i32, align 4
  %19 = alloca <16 x float>, align 64
  %20 = alloca i32, align 4
  %21 = alloca i32, align 4
  %22 = alloca float, align 4
  store i64 %0, ptr %3, align 8
  store ptr %1, ptr %4, align 8
  %23 = load ptr, ptr %4, align 8
  store ptr %23, ptr %5, align 8
  %24 = load ptr, ptr %5, align 8
  %25 = getelementptr inbounds nuw %struct.Blocks, ptr %24, i32 0, i32 12
  %26 = load i64, ptr %25, align 8
  %27 = sdiv i64 %26, 32
  store i64 %27, ptr %6, align 8
  %28 = load i64, ptr %3, align 8
  %29 = add nsw i64 %28, 1
  %30 = mul nsw i64 %29, 2
  %31 = load ptr, ptr %5, align 8
  %32 = getelementptr inbounds nuw %struct.Blocks, ptr %31, i32 0, i32 11
  %33 = load i64, ptr %32, align 8
  %34 = call i64 @min_of(i64 noundef %30, i64 noundef %33)
  store i64 %34, ptr %7, align 8
  %35 = load i64, ptr %3, align 8
  %36 = mul nsw i64 %35, 2
  %37 = load i64, ptr %6, align 8
  %38 = mul nsw i64 %36, %37
  store i64 %38, ptr %8, align 8
  br label %39

39:
  %40 = load i64, ptr %8, align 8
  %41 = load i64, ptr %7, align 8
  %42 = load i64, ptr %6, align 8
  %43 = mul nsw i64 %41, %42
  %44 = icmp slt i64 %40, %43
  br i1 %44, label %46, label %45

45:
  store i32 2, ptr %9, align 4
  br label %221

46:
  %47 = load ptr, ptr %5, align 8
  %48 = getelementptr inbounds nuw %struct.Blocks, ptr %47, i32 0, i32 0
  %49 = load ptr, ptr %48, align 8
  %50 = load i64, ptr %8, align 8
  %51 = mul nsw i64 %50, 32
  %52 = getelementptr inbounds float, ptr %49, i64 %51
  store ptr %52, ptr %10, align 8
  store <16 x float> zeroinitializer, ptr %11, align 64
  store i32 0, ptr %13, align 4
  br label %53

53:
  %54 = load i32, ptr %13, align 4
  %55 = icmp slt i32 %54, 3
  br i1 %55, label %57, label %56

56:
  store i32 5, ptr %9, align 4
  br label %64

57:
  %58 = load i32, ptr %13, align 4
  %59 = sext i32 %58 to i64
  %60 = getelementptr inbounds [16 x <16 x float>], ptr %12, i64 0, i64 %59
  store <16 x float> zeroinitializer, ptr %60, align 64
  br label %61

61:
  %62 = load i32, ptr %13, align 4
  %63 = add nsw i32 %62, 1
  store i32 %63, ptr %13, align 4
  br label %53, !llvm.loop !67

64:
  store i32 0, ptr %14, align 4
  br label %65

65:
  %66 = load i32, ptr %14, align 4
  %67 = icmp slt i32 %66, 32
  br i1 %67, label %69, label %68

68:
  store i32 8, ptr %9, align 4
  br label %88

69:
  %70 = load ptr, ptr %10, align 8
  %71 = load i32, ptr %14, align 4
  %72 = sext i32 %71 to i64
  %73 = getelementptr inbounds float, ptr %70, i64 %72
  %74 = call <16 x float> @load(ptr noundef %73, i32 noundef 0)
  store <16 x float> %74, ptr %15, align 64
  %75 = load <16 x float>, ptr %11, align 64
  %76 = load <16 x float>, ptr %15, align 64
  %77 = call <16 x float> @llvm.fabs.v16f32(<16 x float> %76)
  %78 = call <16 x float> @larger(<16 x float> noundef %75, <16 x float> noundef %77)
  store <16 x float> %78, ptr %11, align 64
  %79 = load <16 x float>, ptr %15, align 64
  %80 = load <16 x float>, ptr %15, align 64
  %81 = fsub <16 x float> %79, %80
  %82 = getelementptr inbounds [16 x <16 x float>], ptr %12, i64 0, i64 2
  %83 = load <16 x float>, ptr %82, align 64
  %84 = fadd <16 x float> %83, %81
  store <16 x float> %84, ptr %82, align 64
  br label %85

85:
  %86 = load i32, ptr %14, align 4
  %87 = add nsw i32 %86, 16
  store i32 %87, ptr %14, align 4
  br label %65, !llvm.loop !68

88:
  %89 = load <16 x float>, ptr %11, align 64
  %90 = call float @largest(<16 x float> noundef %89)
  store float %90, ptr %16, align 4
  %91 = load float, ptr %16, align 4
  %92 = fcmp ogt float %91, 0.000000e+00
  br i1 %92, label %93, label %96

93:
  %94 = load float, ptr %16, align 4
  %95 = fdiv float 1.270000e+02, %94
  br label %97

96:
  br label %97

97:
  %98 = phi float [ %95, %93 ], [ 0.000000e+00, %96 ]
  store float %98, ptr %17, align 4
  store i32 0, ptr %18, align 4
  br label %99

99:
  %100 = load i32, ptr %18, align 4
  %101 = icmp slt i32 %100, 32
  br i1 %101, label %103, label %102

102:
  store i32 11, ptr %9, align 4
  br label %145

103:
  %104 = load ptr, ptr %10, align 8
  %105 = load i32, ptr %18, align 4
  %106 = sext i32 %105 to i64
  %107 = getelementptr inbounds float, ptr %104, i64 %106
  %108 = call <16 x float> @load(ptr noundef %107, i32 noundef 0)
  %109 = load float, ptr %17, align 4
  %110 = insertelement <16 x float> poison, float %109, i64 0
  %111 = shufflevector <16 x float> %110, <16 x float> poison, <16 x i32> zeroinitializer
  %112 = fmul <16 x float> %108, %111
  %113 = call <16 x float> @llvm.rint.v16f32(<16 x float> %112)
  store <16 x float> %113, ptr %19, align 64
  %114 = load <16 x float>, ptr %19, align 64
  %115 = fcmp oge <16 x float> %114, splat (float -1.270000e+02)
  %116 = sext <16 x i1> %115 to <16 x i32>
  %117 = load <16 x float>, ptr %19, align 64
  %118 = fcmp ole <16 x float> %117, splat (float 1.270000e+02)
  %119 = sext <16 x i1> %118 to <16 x i32>
  %120 = and <16 x i32> %116, %119
  %121 = load <16 x float>, ptr %19, align 64
  %122 = icmp slt <16 x i32> %120, zeroinitializer
  %123 = select <16 x i1> %122, <16 x float> %121, <16 x float> zeroinitializer
  store <16 x float> %123, ptr %19, align 64
  %124 = load <16 x float>, ptr %19, align 64
  %125 = fptosi <16 x float> %124 to <16 x i8>
  %126 = load ptr, ptr %5, align 8
  %127 = getelementptr inbounds nuw %struct.Blocks, ptr %126, i32 0, i32 1
  %128 = load ptr, ptr %127, align 8
  %129 = load i64, ptr %8, align 8
  %130 = mul nsw i64 %129, 32
  %131 = getelementptr inbounds i8, ptr %128, i64 %130
  %132 = load i32, ptr %18, align 4
  %133 = sext i32 %132 to i64
  %134 = getelementptr inbounds i8, ptr %131, i64 %133
  store <16 x i8> %125, ptr %134, align 1
  %135 = load <16 x float>, ptr %19, align 64
  %136 = load i32, ptr %18, align 4
  %137 = sdiv i32 %136, 16
  %138 = sext i32 %137 to i64
  %139 = getelementptr inbounds [16 x <16 x float>], ptr %12, i64 0, i64 %138
  %140 = load <16 x float>, ptr %139, align 64
  %141 = fadd <16 x float> %140, %135
  store <16 x float> %141, ptr %139, align 64
  br label %142

142:
  %143 = load i32, ptr %18, align 4
  %144 = add nsw i32 %143, 16
  store i32 %144, ptr %18, align 4
  br label %99, !llvm.loop !69

145:
  %146 = getelementptr inbounds [16 x <16 x float>], ptr %12, i64 0, i64 0
  call void @sums(ptr noundef %146, i32 noundef 3)
  %147 = call i32 @parts_of_tile()
  store i32 %147, ptr %20, align 4
  %148 = load float, ptr %16, align 4
  %149 = fdiv float %148, 1.270000e+02
  %150 = getelementptr inbounds [16 x <16 x float>], ptr %12, i64 0, i64 0
  %151 = load <16 x float>, ptr %150, align 64
  %152 = extractelement <16 x float> %151, i32 2
  %153 = fadd float %149, %152
  %154 = load ptr, ptr %5, align 8
  %155 = getelementptr inbounds nuw %struct.Blocks, ptr %154, i32 0, i32 2
  %156 = load ptr, ptr %155, align 8
  %157 = load i64, ptr %8, align 8
  %158 = getelementptr inbounds float, ptr %156, i64 %157
  store float %153, ptr %158, align 4
  store i32 0, ptr %21, align 4
  br label %159

159:
  %160 = load i32, ptr %21, align 4
  %161 = load i32, ptr %20, align 4
  %162 = icmp slt i32 %160, %161
  br i1 %162, label %164, label %163

163:
  store i32 14, ptr %9, align 4
  br label %217

164:
  %165 = load i32, ptr %20, align 4
  %166 = icmp eq i32 %165, 2
  br i1 %166, label %167, label %172

167:
  %168 = getelementptr inbounds [16 x <16 x float>], ptr %12, i64 0, i64 0
  %169 = load <16 x float>, ptr %168, align 64
  %170 = load i32, ptr %21, align 4
  %171 = extractelement <16 x float> %169, i32 %170
  br label %180

172:
  %173 = getelementptr inbounds [16 x <16 x float>], ptr %12, i64 0, i64 0
  %174 = load <16 x float>, ptr %173, align 64
  %175 = extractelement <16 x float> %174, i32 0
  %176 = getelementptr inbounds [16 x <16 x float>], ptr %12, i64 0, i64 0
  %177 = load <16 x float>, ptr %176, align 64
  %178 = extractelement <16 x float> %177, i32 1
  %179 = fadd float %175, %178
  br label %180

180:
  %181 = phi float [ %171, %167 ], [ %179, %172 ]
  store float %181, ptr %22, align 4
  %182 = load float, ptr %22, align 4
  %183 = fptosi float %182 to i32
  %184 = load ptr, ptr %5, align 8
  %185 = getelementptr inbounds nuw %struct.Blocks, ptr %184, i32 0, i32 3
  %186 = load ptr, ptr %185, align 8
  %187 = load i64, ptr %8, align 8
  %188 = load i32, ptr %20, align 4
  %189 = sext i32 %188 to i64
  %190 = mul nsw i64 %187, %189
  %191 = load i32, ptr %21, align 4
  %192 = sext i32 %191 to i64
  %193 = add nsw i64 %190, %192
  %194 = getelementptr inbounds i32, ptr %186, i64 %193
  store i32 %183, ptr %194, align 4
  %195 = load ptr, ptr %5, align 8
  %196 = getelementptr inbounds nuw %struct.Blocks, ptr %195, i32 0, i32 2
  %197 = load ptr, ptr %196, align 8
  %198 = load i64, ptr %8, align 8
  %199 = getelementptr inbounds float, ptr %197, i64 %198
  %200 = load float, ptr %199, align 4
  %201 = load float, ptr %22, align 4
  %202 = fmul float %200, %201
  %203 = load ptr, ptr %5, align 8
  %204 = getelementptr inbounds nuw %struct.Blocks, ptr %203, i32 0, i32 4
  %205 = load ptr, ptr %204, align 8
  %206 = load i64, ptr %8, align 8
  %207 = load i32, ptr %20, align 4
  %208 = sext i32 %207 to i64
  %209 = mul nsw i64 %206, %208
  %210 = load i32, ptr %21, align 4
  %211 = sext i32 %210 to i64
  %212 = add nsw i64 %209, %211
  %213 = getelementptr inbounds float, ptr %205, i64 %212
  store float %202, ptr %213, align 4
  br label %214

214:
  %215 = load i32, ptr %21, align 4
  %216 = add nsw i32 %215, 1
  store i32 %216, ptr %21, align 4
  br label %159, !llvm.loop !70

217:
  br label %218

218:
  %219 = load i64, ptr %8, align 8
  %220 = add nsw i64 %219, 1
  store i64 %220, ptr %8, align 8
  br label %39, !llvm.loop !71

221:
  ret void
}

declare <16 x float> @llvm.fabs.v16f32(<16 x float>) #12

define internal i32 @parts_of_tile() #1 {
  %1 = load i64, ptr @group, align 8
  %2 = icmp eq i64 %1, 16
  %3 = zext i1 %2 to i64
  %4 = select i1 %2, i32 2, i32 1
  ret i32 %4
}

define internal void @block_tiles(i64 noundef %0, ptr noundef %1, i32 noundef %2) #1 {
  %4 = alloca i64, align 8
  %5 = alloca ptr, align 8
  %6 = alloca i32, align 4
  %7 = alloca i64, align 8
  %8 = alloca i64, align 8
  %9 = alloca i32, align 4
  %10 = alloca i64, align 8
  %11 = alloca i64, align 8
  store i64 %0, ptr %4, align 8
  store ptr %1, ptr %5, align 8
  store i32 %2, ptr %6, align 4
  %12 = load i64, ptr %4, align 8
  %13 = add nsw i64 %12, 1
  %14 = mul nsw i64 %13, 3
  %15 = load ptr, ptr %5, align 8
  %16 = getelementptr inbounds nuw %struct.Blocks, ptr %15, i32 0, i32 13
  %17 = load i64, ptr %16, align 8
  %18 = sdiv i64 %17, 16
  %19 = call i64 @min_of(i64 noundef %14, i64 noundef %18)
  store i64 %19, ptr %7, align 8
  store i64 0, ptr %8, align 8
  br label %20

20:
  %21 = load i64, ptr %8, align 8
  %22 = load ptr, ptr %5, align 8
  %23 = getelementptr inbounds nuw %struct.Blocks, ptr %22, i32 0, i32 11
  %24 = load i64, ptr %23, align 8
  %25 = icmp slt i64 %21, %24
  br i1 %25, label %27, label %26

26:
  store i32 2, ptr %9, align 4
  br label %171

27:
  %28 = load i64, ptr %4, align 8
  %29 = mul nsw i64 %28, 3
  store i64 %29, ptr %10, align 8
  br label %30

30:
  %31 = load i64, ptr %10, align 8
  %32 = load i64, ptr %7, align 8
  %33 = icmp slt i64 %31, %32
  br i1 %33, label %35, label %34

34:
  store i32 5, ptr %9, align 4
  br label %167

35:
  store i64 0, ptr %11, align 8
  br label %36

36:
  %37 = load i64, ptr %11, align 8
  %38 = icmp slt i64 %37, 16
  br i1 %38, label %40, label %39

39:
  store i32 8, ptr %9, align 4
  br label %163

40:
  %41 = load ptr, ptr %5, align 8
  %42 = getelementptr inbounds nuw %struct.Blocks, ptr %41, i32 0, i32 11
  %43 = load i64, ptr %42, align 8
  %44 = load i64, ptr %8, align 8
  %45 = sub nsw i64 %43, %44
  %46 = call i64 @min_of(i64 noundef %45, i64 noundef 8)
  switch i64 %46, label %159 [
    i64 1, label %47
    i64 2, label %61
    i64 3, label %75
    i64 4, label %89
    i64 5, label %103
    i64 6, label %117
    i64 7, label %131
    i64 8, label %145
  ]

47:
  %48 = load i32, ptr %6, align 4
  %49 = icmp ne i32 %48, 0
  br i1 %49, label %50, label %55

50:
  %51 = load ptr, ptr %5, align 8
  %52 = load i64, ptr %10, align 8
  %53 = load i64, ptr %11, align 8
  %54 = load i64, ptr %8, align 8
  call void @integer_tile(ptr noundef %51, i64 noundef %52, i64 noundef %53, i64 noundef %54, i32 noundef 1)
  br label %60

55:
  %56 = load ptr, ptr %5, align 8
  %57 = load i64, ptr %10, align 8
  %58 = load i64, ptr %11, align 8
  %59 = load i64, ptr %8, align 8
  call void @float_tile(ptr noundef %56, i64 noundef %57, i64 noundef %58, i64 noundef %59, i32 noundef 1)
  br label %60

60:
  br label %159

61:
  %62 = load i32, ptr %6, align 4
  %63 = icmp ne i32 %62, 0
  br i1 %63, label %64, label %69

64:
  %65 = load ptr, ptr %5, align 8
  %66 = load i64, ptr %10, align 8
  %67 = load i64, ptr %11, align 8
  %68 = load i64, ptr %8, align 8
  call void @integer_tile(ptr noundef %65, i64 noundef %66, i64 noundef %67, i64 noundef %68, i32 noundef 2)
  br label %74

69:
  %70 = load ptr, ptr %5, align 8
  %71 = load i64, ptr %10, align 8
  %72 = load i64, ptr %11, align 8
  %73 = load i64, ptr %8, align 8
  call void @float_tile(ptr noundef %70, i64 noundef %71, i64 noundef %72, i64 noundef %73, i32 noundef 2)
  br label %74

74:
  br label %159

75:
  %76 = load i32, ptr %6, align 4
  %77 = icmp ne i32 %76, 0
  br i1 %77, label %78, label %83

78:
  %79 = load ptr, ptr %5, align 8
  %80 = load i64, ptr %10, align 8
  %81 = load i64, ptr %11, align 8
  %82 = load i64, ptr %8, align 8
  call void @integer_tile(ptr noundef %79, i64 noundef %80, i64 noundef %81, i64 noundef %82, i32 noundef 3)
  br label %88

83:
  %84 = load ptr, ptr %5, align 8
  %85 = load i64, ptr %10, align 8
  %86 = load i64, ptr %11, align 8
  %87 = load i64, ptr %8, align 8
  call void @float_tile(ptr noundef %84, i64 noundef %85, i64 noundef %86, i64 noundef %87, i32 noundef 3)
  br label %88

88:
  br label %159

89:
  %90 = load i32, ptr %6, align 4
  %91 = icmp ne i32 %90, 0
  br i1 %91, label %92, label %97

92:
  %93 = load ptr, ptr %5, align 8
  %94 = load i64, ptr %10, align 8
  %95 = load i64, ptr %11, align 8
  %96 = load i64, ptr %8, align 8
  call void @integer_tile(ptr noundef %93, i64 noundef %94, i64 noundef %95, i64 noundef %96, i32 noundef 4)
  br label %102

97:
  %98 = load ptr, ptr %5, align 8
  %99 = load i64, ptr %10, align 8
  %100 = load i64, ptr %11, align 8
  %101 = load i64, ptr %8, align 8
  call void @float_tile(ptr noundef %98, i64 noundef %99, i64 noundef %100, i64 noundef %101, i32 noundef 4)
  br label %102

102:
  br label %159

103:
  %104 = load i32, ptr %6, align 4
  %105 = icmp ne i32 %104, 0
  br i1 %105, label %106, label %111

106:
  %107 = load ptr, ptr %5, align 8
  %108 = load i64, ptr %10, align 8
  %109 = load i64, ptr %11, align 8
  %110 = load i64, ptr %8, align 8
  call void @integer_tile(ptr noundef %107, i64 noundef %108, i64 noundef %109, i64 noundef %110, i32 noundef 5)
  br label %116

111:
  %112 = load ptr, ptr %5, align 8
  %113 = load i64, ptr %10, align 8
  %114 = load i64, ptr %11, align 8
  %115 = load i64, ptr %8, align 8
  call void @float_tile(ptr noundef %112, i64 noundef %113, i64 noundef %114, i64 noundef %115, i32 noundef 5)
  br label %116

116:
  br label %159

117:
  %118 = load i32, ptr %6, align 4
  %119 = icmp ne i32 %118, 0
  br i1 %119, label %120, label %125

120:
  %121 = load ptr, ptr %5, align 8
  %122 = load i64, ptr %10, align 8
  %123 = load i64, ptr %11, align 8
  %124 = load i64, ptr %8, align 8
  call void @integer_tile(ptr noundef %121, i64 noundef %122, i64 noundef %123, i64 noundef %124, i32 noundef 6)
  br label %130

125:
  %126 = load ptr, ptr %5, align 8
  %127 = load i64, ptr %10, align 8
  %128 = load i64, ptr %11, align 8
  %129 = load i64, ptr %8, align 8
  call void @float_tile(ptr noundef %126, i64 noundef %127, i64 noundef %128, i64 noundef %129, i32 noundef 6)
  br label %130

130:
  br label %159

131:
  %132 = load i32, ptr %6, align 4
  %133 = icmp ne i32 %132, 0
  br i1 %133, label %134, label %139

134:
  %135 = load ptr, ptr %5, align 8
  %136 = load i64, ptr %10, align 8
  %137 = load i64, ptr %11, align 8
  %138 = load i64, ptr %8, align 8
  call void @integer_tile(ptr noundef %135, i64 noundef %136, i64 noundef %137, i64 noundef %138, i32 noundef 7)
  br label %144

139:
  %140 = load ptr, ptr %5, align 8
  %141 = load i64, ptr %10, align 8
  %142 = load i64, ptr %11, align 8
  %143 = load i64, ptr %8, align 8
  call void @float_tile(ptr noundef %140, i64 noundef %141, i64 noundef %142, i64 noundef %143, i32 noundef 7)
  br label %144

144:
  br label %159

145:
  %146 = load i32, ptr %6, align 4
  %147 = icmp ne i32 %146, 0
  br i1 %147, label %148, label %153

148:
  %149 = load ptr, ptr %5, align 8
  %150 = load i64, ptr %10, align 8
  %151 = load i64, ptr %11, align 8
  %152 = load i64, ptr %8, align 8
  call void @integer_tile(ptr noundef %149, i64 noundef %150, i64 noundef %151, i64 noundef %152, i32 noundef 8)
  br label %158

153:
  %154 = load ptr, ptr %5, align 8
  %155 = load i64, ptr %10, align 8
  %156 = load i64, ptr %11, align 8
  %157 = load i64, ptr %8, align 8
  call void @float_tile(ptr noundef %154, i64 noundef %155, i64 noundef %156, i64 noundef %157, i32 noundef 8)
  br label %158

158:
  br label %159

159:
  br label %160

160:
  %161 = load i64, ptr %11, align 8
  %162 = add nsw i64 %161, 16
  store i64 %162, ptr %11, align 8
  br label %36, !llvm.loop !72

163:
  br label %164

164:
  %165 = load i64, ptr %10, align 8
  %166 = add nsw i64 %165, 1
  store i64 %166, ptr %10, align 8
  br label %30, !llvm.loop !73

167:
  br label %168

168:
  %169 = load i64, ptr %8, align 8
  %170 = add nsw i64 %169, 8
  store i64 %170, ptr %8, align 8
  br label %20, !llvm.loop !74

171:
  ret void
}

define internal void @integer_tile(ptr noundef %0, i64 noundef %1, i64 noundef %2, i64 noundef %3, i32 noundef %4) #11 {
  %6 = alloca ptr, align 8
  %7 = alloca i64, align 8
  %8 = alloca i64, align 8
  %9 = alloca i64, align 8
  %10 = alloca i32, align 4
  %11 = alloca i64, align 8
  %12 = alloca i64, align 8
  %13 = alloca i32, align 4
  %14 = alloca i32, align 4
  %15 = alloca i32, align 4
  %16 = alloca ptr, align 8
  %17 = alloca [8 x <16 x float>], align 64
  %18 = alloca i32, align 4
  %19 = alloca i64, align 8
  %20 = alloca i32, align 4
  %21 = alloca [16 x <16 x i32>], align 64
  %22 = alloca i32, align 4
  %23 = alloca i32, align 4
  %24 = alloca <64 x i8>, align 64
  %25 = alloca <64 x i8>, align 64
  %26 = alloca i32, align 4
  %27 = alloca ptr, align 8
  %28 = alloca i32, align 4
  %29 = alloca i64, align 8
  %30 = alloca <16 x float>, align 64
  %31 = alloca <16 x float>, align 64
  %32 = alloca i32, align 4
  %33 = alloca i64, align 8
  %34 = alloca <16 x float>, align 64
  %35 = alloca i32, align 4
  store ptr %0, ptr %6, align 8
  store i64 %1, ptr %7, align 8
  store i64 %2, ptr %8, align 8
  store i64 %3, ptr %9, align 8
  store i32 %4, ptr %10, align 4
  %36 = load ptr, ptr %6, align 8
  %37 = getelementptr inbounds nuw %struct.Blocks, ptr %36, i32 0, i32 12
  %38 = load i64, ptr %37, align 8
  %39 = sdiv i64 %38, 32
  store i64 %39, ptr %11, align 8
  %40 = load i64, ptr @code_bits, align 8
  %41 = mul nsw i64 512, %40
  %42 = sdiv i64 %41, 8
  store i64 %42, ptr %12, align 8
  %43 = call i32 @parts_of_tile()
  store i32 %43, ptr %13, align 4
  %44 = load i64, ptr @code_bits, align 8
  %45 = icmp eq i64 %44, 4
  br i1 %45, label %47, label %46

46:
  br label %47

47:
  %48 = phi i1 [ true, %5 ], [ true, %46 ]
  %49 = zext i1 %48 to i32
  store i32 %49, ptr %14, align 4
  %50 = load i64, ptr @code_bits, align 8
  %51 = icmp eq i64 %50, 8
  br i1 %51, label %52, label %55

52:
  %53 = load i32, ptr %14, align 4
  %54 = mul nsw i32 128, %53
  br label %60

55:
  %56 = load i64, ptr @has_minimum, align 8
  %57 = icmp ne i64 %56, 0
  %58 = zext i1 %57 to i64
  %59 = select i1 %57, i32 0, i32 8
  br label %60

60:
  %61 = phi i32 [ %54, %52 ], [ %59, %55 ]
  store i32 %61, ptr %15, align 4
  %62 = load ptr, ptr %6, align 8
  %63 = getelementptr inbounds nuw %struct.Blocks, ptr %62, i32 0, i32 5
  %64 = load ptr, ptr %63, align 8
  %65 = load i64, ptr %7, align 8
  %66 = load i64, ptr %11, align 8
  %67 = mul nsw i64 %65, %66
  %68 = load i64, ptr %12, align 8
  %69 = mul nsw i64 %67, %68
  %70 = getelementptr inbounds i8, ptr %64, i64 %69
  %71 = load i64, ptr %8, align 8
  %72 = mul nsw i64 4, %71
  %73 = getelementptr inbounds i8, ptr %70, i64 %72
  store ptr %73, ptr %16, align 8
  store i32 0, ptr %18, align 4
  br label %74

74:
  %75 = load i32, ptr %18, align 4
  %76 = load i32, ptr %10, align 4
  %77 = icmp slt i32 %75, %76
  br i1 %77, label %79, label %78

78:
  br label %86

79:
  %80 = load i32, ptr %18, align 4
  %81 = sext i32 %80 to i64
  %82 = getelementptr inbounds [8 x <16 x float>], ptr %17, i64 0, i64 %81
  store <16 x float> zeroinitializer, ptr %82, align 64
  br label %83

83:
  %84 = load i32, ptr %18, align 4
  %85 = add nsw i32 %84, 1
  store i32 %85, ptr %18, align 4
  br label %74, !llvm.loop !75

86:
  store i64 0, ptr %19, align 8
  br label %87

87:
  %88 = load i64, ptr %19, align 8
  %89 = load i64, ptr %11, align 8
  %90 = icmp slt i64 %88, %89
  br i1 %90, label %92, label %91

91:
  store i32 5, ptr %20, align 4
  br label %365

92:
  store i32 0, ptr %22, align 4
  br label %93

93:
  %94 = load i32, ptr %22, align 4
  %95 = load i32, ptr %10, align 4
  %96 = load i32, ptr %13, align 4
  %97 = mul nsw i32 %95, %96
  %98 = icmp slt i32 %94, %97
  br i1 %98, label %100, label %99

99:
  store i32 8, ptr %20, align 4
  br label %135

100:
  %101 = load i32, ptr %15, align 4
  %102 = sub nsw i32 0, %101
  %103 = load ptr, ptr %6, align 8
  %104 = getelementptr inbounds nuw %struct.Blocks, ptr %103, i32 0, i32 3
  %105 = load ptr, ptr %104, align 8
  %106 = load i64, ptr %9, align 8
  %107 = load i32, ptr %22, align 4
  %108 = load i32, ptr %10, align 4
  %109 = srem i32 %107, %108
  %110 = sext i32 %109 to i64
  %111 = add nsw i64 %106, %110
  %112 = load i64, ptr %11, align 8
  %113 = mul nsw i64 %111, %112
  %114 = load i64, ptr %19, align 8
  %115 = add nsw i64 %113, %114
  %116 = load i32, ptr %13, align 4
  %117 = sext i32 %116 to i64
  %118 = mul nsw i64 %115, %117
  %119 = load i32, ptr %22, align 4
  %120 = load i32, ptr %10, align 4
  %121 = sdiv i32 %119, %120
  %122 = sext i32 %121 to i64
  %123 = add nsw i64 %118, %122
  %124 = getelementptr inbounds i32, ptr %105, i64 %123
  %125 = load i32, ptr %124, align 4
  %126 = mul nsw i32 %102, %125
  %127 = insertelement <16 x i32> poison, i32 %126, i64 0
  %128 = shufflevector <16 x i32> %127, <16 x i32> poison, <16 x i32> zeroinitializer
  %129 = load i32, ptr %22, align 4
  %130 = sext i32 %129 to i64
  %131 = getelementptr inbounds [16 x <16 x i32>], ptr %21, i64 0, i64 %130
  store <16 x i32> %128, ptr %131, align 64
  br label %132

132:
  %133 = load i32, ptr %22, align 4
  %134 = add nsw i32 %133, 1
  store i32 %134, ptr %22, align 4
  br label %93, !llvm.loop !76

135:
  %136 = load ptr, ptr %16, align 8
  %137 = load i64, ptr %12, align 8
  call void @prefetch(ptr noundef %136, i64 noundef %137, i64 noundef 4096)
  store i32 0, ptr %23, align 4
  br label %138

138:
  %139 = load i32, ptr %23, align 4
  %140 = icmp slt i32 %139, 4
  br i1 %140, label %142, label %141

141:
  store i32 11, ptr %20, align 4
  br label %243

142:
  %143 = load ptr, ptr %16, align 8
  %144 = load i32, ptr %23, align 4
  %145 = mul nsw i32 64, %144
  %146 = sext i32 %145 to i64
  %147 = getelementptr inbounds i8, ptr %143, i64 %146
  %148 = load <64 x i8>, ptr %147, align 1
  store <64 x i8> %148, ptr %24, align 64
  %149 = load <64 x i8>, ptr %24, align 64
  %150 = lshr <64 x i8> %149, splat (i8 4)
  store <64 x i8> %150, ptr %25, align 64
  %151 = load i64, ptr @code_bits, align 8
  %152 = icmp eq i64 %151, 4
  br i1 %152, label %153, label %156

153:
  %154 = load <64 x i8>, ptr %24, align 64
  %155 = and <64 x i8> %154, splat (i8 15)
  store <64 x i8> %155, ptr %24, align 64
  br label %164

156:
  %157 = load ptr, ptr %16, align 8
  %158 = load i32, ptr %23, align 4
  %159 = add nsw i32 %158, 4
  %160 = mul nsw i32 64, %159
  %161 = sext i32 %160 to i64
  %162 = getelementptr inbounds i8, ptr %157, i64 %161
  %163 = load <64 x i8>, ptr %162, align 1
  store <64 x i8> %163, ptr %25, align 64
  br label %164

164:
  %165 = load i64, ptr @code_bits, align 8
  %166 = icmp eq i64 %165, 8
  br i1 %166, label %167, label %175

167:
  %168 = load i32, ptr %14, align 4
  %169 = icmp ne i32 %168, 0
  br i1 %169, label %170, label %175

170:
  %171 = load <64 x i8>, ptr %24, align 64
  %172 = xor <64 x i8> %171, splat (i8 -128)
  store <64 x i8> %172, ptr %24, align 64
  %173 = load <64 x i8>, ptr %25, align 64
  %174 = xor <64 x i8> %173, splat (i8 -128)
  store <64 x i8> %174, ptr %25, align 64
  br label %175

175:
  store i32 0, ptr %26, align 4
  br label %176

176:
  %177 = load i32, ptr %26, align 4
  %178 = load i32, ptr %10, align 4
  %179 = icmp slt i32 %177, %178
  br i1 %179, label %181, label %180

180:
  store i32 14, ptr %20, align 4
  br label %239

181:
  %182 = load ptr, ptr %6, align 8
  %183 = getelementptr inbounds nuw %struct.Blocks, ptr %182, i32 0, i32 1
  %184 = load ptr, ptr %183, align 8
  %185 = load i64, ptr %9, align 8
  %186 = load i32, ptr %26, align 4
  %187 = sext i32 %186 to i64
  %188 = add nsw i64 %185, %187
  %189 = load ptr, ptr %6, align 8
  %190 = getelementptr inbounds nuw %struct.Blocks, ptr %189, i32 0, i32 12
  %191 = load i64, ptr %190, align 8
  %192 = mul nsw i64 %188, %191
  %193 = getelementptr inbounds i8, ptr %184, i64 %192
  %194 = load i64, ptr %19, align 8
  %195 = mul nsw i64 %194, 32
  %196 = getelementptr inbounds i8, ptr %193, i64 %195
  store ptr %196, ptr %27, align 8
  %197 = load i32, ptr %26, align 4
  %198 = sext i32 %197 to i64
  %199 = getelementptr inbounds [16 x <16 x i32>], ptr %21, i64 0, i64 %198
  %200 = load <16 x i32>, ptr %199, align 64
  %201 = load <64 x i8>, ptr %24, align 64
  %202 = load ptr, ptr %27, align 8
  %203 = load i32, ptr %23, align 4
  %204 = sext i32 %203 to i64
  %205 = getelementptr inbounds i32, ptr %202, i64 %204
  %206 = load i32, ptr %205, align 4
  %207 = call <16 x i32> @add_dot(<16 x i32> noundef %200, <64 x i8> noundef %201, i32 noundef %206)
  %208 = load i32, ptr %26, align 4
  %209 = sext i32 %208 to i64
  %210 = getelementptr inbounds [16 x <16 x i32>], ptr %21, i64 0, i64 %209
  store <16 x i32> %207, ptr %210, align 64
  %211 = load i32, ptr %26, align 4
  %212 = load i32, ptr %13, align 4
  %213 = sub nsw i32 %212, 1
  %214 = load i32, ptr %10, align 4
  %215 = mul nsw i32 %213, %214
  %216 = add nsw i32 %211, %215
  %217 = sext i32 %216 to i64
  %218 = getelementptr inbounds [16 x <16 x i32>], ptr %21, i64 0, i64 %217
  %219 = load <16 x i32>, ptr %218, align 64
  %220 = load <64 x i8>, ptr %25, align 64
  %221 = load ptr, ptr %27, align 8
  %222 = load i32, ptr %23, align 4
  %223 = add nsw i32 %222, 4
  %224 = sext i32 %223 to i64
  %225 = getelementptr inbounds i32, ptr %221, i64 %224
  %226 = load i32, ptr %225, align 4
  %227 = call <16 x i32> @add_dot(<16 x i32> noundef %219, <64 x i8> noundef %220, i32 noundef %226)
  %228 = load i32, ptr %26, align 4
  %229 = load i32, ptr %13, align 4
  %230 = sub nsw i32 %229, 1
  %231 = load i32, ptr %10, align 4
  %232 = mul nsw i32 %230, %231
  %233 = add nsw i32 %228, %232
  %234 = sext i32 %233 to i64
  %235 = getelementptr inbounds [16 x <16 x i32>], ptr %21, i64 0, i64 %234
  store <16 x i32> %227, ptr %235, align 64
  br label %236

236:
  %237 = load i32, ptr %26, align 4
  %238 = add nsw i32 %237, 1
  store i32 %238, ptr %26, align 4
  br label %176, !llvm.loop !77

239:
  br label %240

240:
  %241 = load i32, ptr %23, align 4
  %242 = add nsw i32 %241, 1
  store i32 %242, ptr %23, align 4
  br label %138, !llvm.loop !78

243:
  store i32 0, ptr %28, align 4
  br label %244

244:
  %245 = load i32, ptr %28, align 4
  %246 = load i32, ptr %13, align 4
  %247 = icmp slt i32 %245, %246
  br i1 %247, label %249, label %248

248:
  store i32 17, ptr %20, align 4
  br label %358

249:
  %250 = load i64, ptr %19, align 8
  %251 = mul nsw i64 %250, 32
  %252 = load i32, ptr %28, align 4
  %253 = mul nsw i32 %252, 16
  %254 = sext i32 %253 to i64
  %255 = add nsw i64 %251, %254
  store i64 %255, ptr %29, align 8
  %256 = load ptr, ptr %6, align 8
  %257 = load ptr, ptr %6, align 8
  %258 = getelementptr inbounds nuw %struct.Blocks, ptr %257, i32 0, i32 6
  %259 = load ptr, ptr %258, align 8
  %260 = load ptr, ptr %6, align 8
  %261 = getelementptr inbounds nuw %struct.Blocks, ptr %260, i32 0, i32 8
  %262 = load ptr, ptr %261, align 8
  %263 = load i64, ptr %7, align 8
  %264 = load i64, ptr %8, align 8
  %265 = load i64, ptr %29, align 8
  %266 = call <16 x float> @group_values(ptr noundef %256, ptr noundef %259, ptr noundef %262, i64 noundef %263, i64 noundef %264, i64 noundef %265)
  store <16 x float> %266, ptr %30, align 64
  store <16 x float> zeroinitializer, ptr %31, align 64
  %267 = load i64, ptr @has_minimum, align 8
  %268 = icmp ne i64 %267, 0
  br i1 %268, label %269, label %281

269:
  %270 = load ptr, ptr %6, align 8
  %271 = load ptr, ptr %6, align 8
  %272 = getelementptr inbounds nuw %struct.Blocks, ptr %271, i32 0, i32 7
  %273 = load ptr, ptr %272, align 8
  %274 = load ptr, ptr %6, align 8
  %275 = getelementptr inbounds nuw %struct.Blocks, ptr %274, i32 0, i32 9
  %276 = load ptr, ptr %275, align 8
  %277 = load i64, ptr %7, align 8
  %278 = load i64, ptr %8, align 8
  %279 = load i64, ptr %29, align 8
  %280 = call <16 x float> @group_values(ptr noundef %270, ptr noundef %273, ptr noundef %276, i64 noundef %277, i64 noundef %278, i64 noundef %279)
  store <16 x float> %280, ptr %31, align 64
  br label %281

281:
  store i32 0, ptr %32, align 4
  br label %282

282:
  %283 = load i32, ptr %32, align 4
  %284 = load i32, ptr %10, align 4
  %285 = icmp slt i32 %283, %284
  br i1 %285, label %287, label %286

286:
  store i32 20, ptr %20, align 4
  br label %354

287:
  %288 = load i64, ptr %9, align 8
  %289 = load i32, ptr %32, align 4
  %290 = sext i32 %289 to i64
  %291 = add nsw i64 %288, %290
  %292 = load i64, ptr %11, align 8
  %293 = mul nsw i64 %291, %292
  %294 = load i64, ptr %19, align 8
  %295 = add nsw i64 %293, %294
  store i64 %295, ptr %33, align 8
  %296 = load i32, ptr %32, align 4
  %297 = load i32, ptr %28, align 4
  %298 = load i32, ptr %10, align 4
  %299 = mul nsw i32 %297, %298
  %300 = add nsw i32 %296, %299
  %301 = sext i32 %300 to i64
  %302 = getelementptr inbounds [16 x <16 x i32>], ptr %21, i64 0, i64 %301
  %303 = load <16 x i32>, ptr %302, align 64
  %304 = sitofp <16 x i32> %303 to <16 x float>
  store <16 x float> %304, ptr %34, align 64
  %305 = load <16 x float>, ptr %30, align 64
  %306 = load ptr, ptr %6, align 8
  %307 = getelementptr inbounds nuw %struct.Blocks, ptr %306, i32 0, i32 2
  %308 = load ptr, ptr %307, align 8
  %309 = load i64, ptr %33, align 8
  %310 = getelementptr inbounds float, ptr %308, i64 %309
  %311 = load float, ptr %310, align 4
  %312 = insertelement <16 x float> poison, float %311, i64 0
  %313 = shufflevector <16 x float> %312, <16 x float> poison, <16 x i32> zeroinitializer
  %314 = fmul <16 x float> %305, %313
  %315 = load <16 x float>, ptr %34, align 64
  %316 = load i32, ptr %32, align 4
  %317 = sext i32 %316 to i64
  %318 = getelementptr inbounds [8 x <16 x float>], ptr %17, i64 0, i64 %317
  %319 = load <16 x float>, ptr %318, align 64
  %320 = call <16 x float> @fma_(<16 x float> noundef %314, <16 x float> noundef %315, <16 x float> noundef %319)
  %321 = load i32, ptr %32, align 4
  %322 = sext i32 %321 to i64
  %323 = getelementptr inbounds [8 x <16 x float>], ptr %17, i64 0, i64 %322
  store <16 x float> %320, ptr %323, align 64
  %324 = load i64, ptr @has_minimum, align 8
  %325 = icmp ne i64 %324, 0
  br i1 %325, label %326, label %350

326:
  %327 = load <16 x float>, ptr %31, align 64
  %328 = load ptr, ptr %6, align 8
  %329 = getelementptr inbounds nuw %struct.Blocks, ptr %328, i32 0, i32 4
  %330 = load ptr, ptr %329, align 8
  %331 = load i64, ptr %33, align 8
  %332 = load i32, ptr %13, align 4
  %333 = sext i32 %332 to i64
  %334 = mul nsw i64 %331, %333
  %335 = load i32, ptr %28, align 4
  %336 = sext i32 %335 to i64
  %337 = add nsw i64 %334, %336
  %338 = getelementptr inbounds float, ptr %330, i64 %337
  %339 = load float, ptr %338, align 4
  %340 = insertelement <16 x float> poison, float %339, i64 0
  %341 = shufflevector <16 x float> %340, <16 x float> poison, <16 x i32> zeroinitializer
  %342 = load i32, ptr %32, align 4
  %343 = sext i32 %342 to i64
  %344 = getelementptr inbounds [8 x <16 x float>], ptr %17, i64 0, i64 %343
  %345 = load <16 x float>, ptr %344, align 64
  %346 = call <16 x float> @fma_(<16 x float> noundef %327, <16 x float> noundef %341, <16 x float> noundef %345)
  %347 = load i32, ptr %32, align 4
  %348 = sext i32 %347 to i64
  %349 = getelementptr inbounds [8 x <16 x float>], ptr %17, i64 0, i64 %348
  store <16 x float> %346, ptr %349, align 64
  br label %350

350:
  br label %351

351:
  %352 = load i32, ptr %32, align 4
  %353 = add nsw i32 %352, 1
  store i32 %353, ptr %32, align 4
  br label %282, !llvm.loop !79

354:
  br label %355

355:
  %356 = load i32, ptr %28, align 4
  %357 = add nsw i32 %356, 1
  store i32 %357, ptr %28, align 4
  br label %244, !llvm.loop !80

358:
  br label %359

359:
  %360 = load i64, ptr %19, align 8
  %361 = add nsw i64 %360, 1
  store i64 %361, ptr %19, align 8
  %362 = load i64, ptr %12, align 8
  %363 = load ptr, ptr %16, align 8
  %364 = getelementptr inbounds i8, ptr %363, i64 %362
  store ptr %364, ptr %16, align 8
  br label %87, !llvm.loop !81

365:
  store i32 0, ptr %35, align 4
  br label %366

366:
  %367 = load i32, ptr %35, align 4
  %368 = load i32, ptr %10, align 4
  %369 = icmp slt i32 %367, %368
  br i1 %369, label %371, label %370

370:
  store i32 23, ptr %20, align 4
  br label %396

371:
  %372 = load ptr, ptr %6, align 8
  %373 = getelementptr inbounds nuw %struct.Blocks, ptr %372, i32 0, i32 10
  %374 = load ptr, ptr %373, align 8
  %375 = load i64, ptr %9, align 8
  %376 = load i32, ptr %35, align 4
  %377 = sext i32 %376 to i64
  %378 = add nsw i64 %375, %377
  %379 = load ptr, ptr %6, align 8
  %380 = getelementptr inbounds nuw %struct.Blocks, ptr %379, i32 0, i32 13
  %381 = load i64, ptr %380, align 8
  %382 = mul nsw i64 %378, %381
  %383 = getelementptr inbounds float, ptr %374, i64 %382
  %384 = load i64, ptr %7, align 8
  %385 = mul nsw i64 %384, 16
  %386 = getelementptr inbounds float, ptr %383, i64 %385
  %387 = load i64, ptr %8, align 8
  %388 = getelementptr inbounds float, ptr %386, i64 %387
  %389 = load i32, ptr %35, align 4
  %390 = sext i32 %389 to i64
  %391 = getelementptr inbounds [8 x <16 x float>], ptr %17, i64 0, i64 %390
  %392 = load <16 x float>, ptr %391, align 64
  call void @store(ptr noundef %388, <16 x float> noundef %392)
  br label %393

393:
  %394 = load i32, ptr %35, align 4
  %395 = add nsw i32 %394, 1
  store i32 %395, ptr %35, align 4
  br label %366, !llvm.loop !82

396:
  ret void
}

define internal void @float_tile(ptr noundef %0, i64 noundef %1, i64 noundef %2, i64 noundef %3, i32 noundef %4) #11 {
  %6 = alloca ptr, align 8
  %7 = alloca i64, align 8
  %8 = alloca i64, align 8
  %9 = alloca i64, align 8
  %10 = alloca i32, align 4
  %11 = alloca i64, align 8
  %12 = alloca i64, align 8
  %13 = alloca ptr, align 8
  %14 = alloca [16 x <16 x float>], align 64
  %15 = alloca i32, align 4
  %16 = alloca i64, align 8
  %17 = alloca i32, align 4
  %18 = alloca i32, align 4
  %19 = alloca i64, align 8
  %20 = alloca <16 x float>, align 64
  %21 = alloca <16 x float>, align 64
  %22 = alloca i32, align 4
  %23 = alloca <16 x i32>, align 64
  %24 = alloca i32, align 4
  %25 = alloca <16 x i32>, align 64
  %26 = alloca <16 x float>, align 64
  %27 = alloca i32, align 4
  %28 = alloca float, align 4
  %29 = alloca i32, align 4
  store ptr %0, ptr %6, align 8
  store i64 %1, ptr %7, align 8
  store i64 %2, ptr %8, align 8
  store i64 %3, ptr %9, align 8
  store i32 %4, ptr %10, align 4
  %30 = load ptr, ptr %6, align 8
  %31 = getelementptr inbounds nuw %struct.Blocks, ptr %30, i32 0, i32 12
  %32 = load i64, ptr %31, align 8
  %33 = sdiv i64 %32, 32
  store i64 %33, ptr %11, align 8
  %34 = load i64, ptr @code_bits, align 8
  %35 = mul nsw i64 512, %34
  %36 = sdiv i64 %35, 8
  store i64 %36, ptr %12, align 8
  %37 = load ptr, ptr %6, align 8
  %38 = getelementptr inbounds nuw %struct.Blocks, ptr %37, i32 0, i32 5
  %39 = load ptr, ptr %38, align 8
  %40 = load i64, ptr %7, align 8
  %41 = load i64, ptr %11, align 8
  %42 = mul nsw i64 %40, %41
  %43 = load i64, ptr %12, align 8
  %44 = mul nsw i64 %42, %43
  %45 = getelementptr inbounds i8, ptr %39, i64 %44
  %46 = load i64, ptr %8, align 8
  %47 = mul nsw i64 4, %46
  %48 = getelementptr inbounds i8, ptr %45, i64 %47
  store ptr %48, ptr %13, align 8
  store i32 0, ptr %15, align 4
  br label %49

49:
  %50 = load i32, ptr %15, align 4
  %51 = load i32, ptr %10, align 4
  %52 = mul nsw i32 2, %51
  %53 = icmp slt i32 %50, %52
  br i1 %53, label %55, label %54

54:
  br label %62

55:
  %56 = load i32, ptr %15, align 4
  %57 = sext i32 %56 to i64
  %58 = getelementptr inbounds [16 x <16 x float>], ptr %14, i64 0, i64 %57
  store <16 x float> zeroinitializer, ptr %58, align 64
  br label %59

59:
  %60 = load i32, ptr %15, align 4
  %61 = add nsw i32 %60, 1
  store i32 %61, ptr %15, align 4
  br label %49, !llvm.loop !83

62:
  store i64 0, ptr %16, align 8
  br label %63

63:
  %64 = load i64, ptr %16, align 8
  %65 = load i64, ptr %11, align 8
  %66 = icmp slt i64 %64, %65
  br i1 %66, label %68, label %67

67:
  store i32 5, ptr %17, align 4
  br label %239

68:
  %69 = load ptr, ptr %13, align 8
  %70 = load i64, ptr %12, align 8
  call void @prefetch(ptr noundef %69, i64 noundef %70, i64 noundef 4096)
  store i32 0, ptr %18, align 4
  br label %71

71:
  %72 = load i32, ptr %18, align 4
  %73 = icmp slt i32 %72, 2
  br i1 %73, label %75, label %74

74:
  store i32 8, ptr %17, align 4
  br label %232

75:
  %76 = load i64, ptr %16, align 8
  %77 = mul nsw i64 %76, 32
  %78 = load i32, ptr %18, align 4
  %79 = mul nsw i32 %78, 16
  %80 = sext i32 %79 to i64
  %81 = add nsw i64 %77, %80
  store i64 %81, ptr %19, align 8
  %82 = load ptr, ptr %6, align 8
  %83 = load ptr, ptr %6, align 8
  %84 = getelementptr inbounds nuw %struct.Blocks, ptr %83, i32 0, i32 6
  %85 = load ptr, ptr %84, align 8
  %86 = load ptr, ptr %6, align 8
  %87 = getelementptr inbounds nuw %struct.Blocks, ptr %86, i32 0, i32 8
  %88 = load ptr, ptr %87, align 8
  %89 = load i64, ptr %7, align 8
  %90 = load i64, ptr %8, align 8
  %91 = load i64, ptr %19, align 8
  %92 = call <16 x float> @group_values(ptr noundef %82, ptr noundef %85, ptr noundef %88, i64 noundef %89, i64 noundef %90, i64 noundef %91)
  store <16 x float> %92, ptr %20, align 64
  %93 = load <16 x float>, ptr %20, align 64
  %94 = load i64, ptr @code_bits, align 8
  %95 = icmp eq i64 %94, 4
  %96 = zext i1 %95 to i64
  %97 = select i1 %95, float -8.000000e+00, float 0.000000e+00
  %98 = insertelement <16 x float> poison, float %97, i64 0
  %99 = shufflevector <16 x float> %98, <16 x float> poison, <16 x i32> zeroinitializer
  %100 = fmul <16 x float> %93, %99
  store <16 x float> %100, ptr %21, align 64
  %101 = load i64, ptr @has_minimum, align 8
  %102 = icmp ne i64 %101, 0
  br i1 %102, label %103, label %115

103:
  %104 = load ptr, ptr %6, align 8
  %105 = load ptr, ptr %6, align 8
  %106 = getelementptr inbounds nuw %struct.Blocks, ptr %105, i32 0, i32 7
  %107 = load ptr, ptr %106, align 8
  %108 = load ptr, ptr %6, align 8
  %109 = getelementptr inbounds nuw %struct.Blocks, ptr %108, i32 0, i32 9
  %110 = load ptr, ptr %109, align 8
  %111 = load i64, ptr %7, align 8
  %112 = load i64, ptr %8, align 8
  %113 = load i64, ptr %19, align 8
  %114 = call <16 x float> @group_values(ptr noundef %104, ptr noundef %107, ptr noundef %110, i64 noundef %111, i64 noundef %112, i64 noundef %113)
  store <16 x float> %114, ptr %21, align 64
  br label %115

115:
  store i32 0, ptr %22, align 4
  br label %116

116:
  %117 = load i32, ptr %22, align 4
  %118 = icmp slt i32 %117, 4
  br i1 %118, label %120, label %119

119:
  store i32 11, ptr %17, align 4
  br label %228

120:
  %121 = load ptr, ptr %13, align 8
  %122 = load i64, ptr @code_bits, align 8
  %123 = icmp eq i64 %122, 4
  br i1 %123, label %124, label %126

124:
  %125 = load i32, ptr %22, align 4
  br label %131

126:
  %127 = load i32, ptr %18, align 4
  %128 = mul nsw i32 4, %127
  %129 = load i32, ptr %22, align 4
  %130 = add nsw i32 %128, %129
  br label %131

131:
  %132 = phi i32 [ %125, %124 ], [ %130, %126 ]
  %133 = mul nsw i32 64, %132
  %134 = sext i32 %133 to i64
  %135 = getelementptr inbounds i8, ptr %121, i64 %134
  %136 = load <16 x i32>, ptr %135, align 1
  store <16 x i32> %136, ptr %23, align 64
  store i32 0, ptr %24, align 4
  br label %137

137:
  %138 = load i32, ptr %24, align 4
  %139 = icmp slt i32 %138, 4
  br i1 %139, label %141, label %140

140:
  store i32 14, ptr %17, align 4
  br label %224

141:
  %142 = load i64, ptr @code_bits, align 8
  %143 = icmp eq i64 %142, 4
  br i1 %143, label %144, label %155

144:
  %145 = load <16 x i32>, ptr %23, align 64
  %146 = load i32, ptr %24, align 4
  %147 = mul nsw i32 8, %146
  %148 = load i32, ptr %18, align 4
  %149 = mul nsw i32 4, %148
  %150 = add nsw i32 %147, %149
  %151 = insertelement <16 x i32> poison, i32 %150, i64 0
  %152 = shufflevector <16 x i32> %151, <16 x i32> poison, <16 x i32> zeroinitializer
  %153 = ashr <16 x i32> %145, %152
  %154 = and <16 x i32> %153, splat (i32 15)
  br label %164

155:
  %156 = load <16 x i32>, ptr %23, align 64
  %157 = load i32, ptr %24, align 4
  %158 = mul nsw i32 8, %157
  %159 = sub nsw i32 24, %158
  %160 = insertelement <16 x i32> poison, i32 %159, i64 0
  %161 = shufflevector <16 x i32> %160, <16 x i32> poison, <16 x i32> zeroinitializer
  %162 = shl <16 x i32> %156, %161
  %163 = ashr <16 x i32> %162, splat (i32 24)
  br label %164

164:
  %165 = phi <16 x i32> [ %154, %144 ], [ %163, %155 ]
  store <16 x i32> %165, ptr %25, align 64
  %166 = load <16 x i32>, ptr %25, align 64
  %167 = sitofp <16 x i32> %166 to <16 x float>
  %168 = load <16 x float>, ptr %20, align 64
  %169 = load <16 x float>, ptr %21, align 64
  %170 = call <16 x float> @fma_(<16 x float> noundef %167, <16 x float> noundef %168, <16 x float> noundef %169)
  store <16 x float> %170, ptr %26, align 64
  store i32 0, ptr %27, align 4
  br label %171

171:
  %172 = load i32, ptr %27, align 4
  %173 = load i32, ptr %10, align 4
  %174 = icmp slt i32 %172, %173
  br i1 %174, label %176, label %175

175:
  store i32 17, ptr %17, align 4
  br label %220

176:
  %177 = load ptr, ptr %6, align 8
  %178 = getelementptr inbounds nuw %struct.Blocks, ptr %177, i32 0, i32 0
  %179 = load ptr, ptr %178, align 8
  %180 = load i64, ptr %9, align 8
  %181 = load i32, ptr %27, align 4
  %182 = sext i32 %181 to i64
  %183 = add nsw i64 %180, %182
  %184 = load ptr, ptr %6, align 8
  %185 = getelementptr inbounds nuw %struct.Blocks, ptr %184, i32 0, i32 12
  %186 = load i64, ptr %185, align 8
  %187 = mul nsw i64 %183, %186
  %188 = load i64, ptr %19, align 8
  %189 = add nsw i64 %187, %188
  %190 = load i32, ptr %22, align 4
  %191 = mul nsw i32 4, %190
  %192 = sext i32 %191 to i64
  %193 = add nsw i64 %189, %192
  %194 = load i32, ptr %24, align 4
  %195 = sext i32 %194 to i64
  %196 = add nsw i64 %193, %195
  %197 = getelementptr inbounds float, ptr %179, i64 %196
  %198 = load float, ptr %197, align 4
  store float %198, ptr %28, align 4
  %199 = load float, ptr %28, align 4
  %200 = insertelement <16 x float> poison, float %199, i64 0
  %201 = shufflevector <16 x float> %200, <16 x float> poison, <16 x i32> zeroinitializer
  %202 = load <16 x float>, ptr %26, align 64
  %203 = load i32, ptr %27, align 4
  %204 = mul nsw i32 2, %203
  %205 = load i32, ptr %18, align 4
  %206 = add nsw i32 %204, %205
  %207 = sext i32 %206 to i64
  %208 = getelementptr inbounds [16 x <16 x float>], ptr %14, i64 0, i64 %207
  %209 = load <16 x float>, ptr %208, align 64
  %210 = call <16 x float> @fma_(<16 x float> noundef %201, <16 x float> noundef %202, <16 x float> noundef %209)
  %211 = load i32, ptr %27, align 4
  %212 = mul nsw i32 2, %211
  %213 = load i32, ptr %18, align 4
  %214 = add nsw i32 %212, %213
  %215 = sext i32 %214 to i64
  %216 = getelementptr inbounds [16 x <16 x float>], ptr %14, i64 0, i64 %215
  store <16 x float> %210, ptr %216, align 64
  br label %217

217:
  %218 = load i32, ptr %27, align 4
  %219 = add nsw i32 %218, 1
  store i32 %219, ptr %27, align 4
  br label %171, !llvm.loop !84

220:
  br label %221

221:
  %222 = load i32, ptr %24, align 4
  %223 = add nsw i32 %222, 1
  store i32 %223, ptr %24, align 4
  br label %137, !llvm.loop !85

224:
  br label %225

225:
  %226 = load i32, ptr %22, align 4
  %227 = add nsw i32 %226, 1
  store i32 %227, ptr %22, align 4
  br label %116, !llvm.loop !86

228:
  br label %229

229:
  %230 = load i32, ptr %18, align 4
  %231 = add nsw i32 %230, 1
  store i32 %231, ptr %18, align 4
  br label %71, !llvm.loop !87

232:
  br label %233

233:
  %234 = load i64, ptr %16, align 8
  %235 = add nsw i64 %234, 1
  store i64 %235, ptr %16, align 8
  %236 = load i64, ptr %12, align 8
  %237 = load ptr, ptr %13, align 8
  %238 = getelementptr inbounds i8, ptr %237, i64 %236
  store ptr %238, ptr %13, align 8
  br label %63, !llvm.loop !88

239:
  store i32 0, ptr %29, align 4
  br label %240

240:
  %241 = load i32, ptr %29, align 4
  %242 = load i32, ptr %10, align 4
  %243 = icmp slt i32 %241, %242
  br i1 %243, label %245, label %244

244:
  store i32 20, ptr %17, align 4
  br label %278

245:
  %246 = load ptr, ptr %6, align 8
  %247 = getelementptr inbounds nuw %struct.Blocks, ptr %246, i32 0, i32 10
  %248 = load ptr, ptr %247, align 8
  %249 = load i64, ptr %9, align 8
  %250 = load i32, ptr %29, align 4
  %251 = sext i32 %250 to i64
  %252 = add nsw i64 %249, %251
  %253 = load ptr, ptr %6, align 8
  %254 = getelementptr inbounds nuw %struct.Blocks, ptr %253, i32 0, i32 13
  %255 = load i64, ptr %254, align 8
  %256 = mul nsw i64 %252, %255
  %257 = getelementptr inbounds float, ptr %248, i64 %256
  %258 = load i64, ptr %7, align 8
  %259 = mul nsw i64 %258, 16
  %260 = getelementptr inbounds float, ptr %257, i64 %259
  %261 = load i64, ptr %8, align 8
  %262 = getelementptr inbounds float, ptr %260, i64 %261
  %263 = load i32, ptr %29, align 4
  %264 = mul nsw i32 2, %263
  %265 = sext i32 %264 to i64
  %266 = getelementptr inbounds [16 x <16 x float>], ptr %14, i64 0, i64 %265
  %267 = load <16 x float>, ptr %266, align 64
  %268 = load i32, ptr %29, align 4
  %269 = mul nsw i32 2, %268
  %270 = add nsw i32 %269, 1
  %271 = sext i32 %270 to i64
  %272 = getelementptr inbounds [16 x <16 x float>], ptr %14, i64 0, i64 %271
  %273 = load <16 x float>, ptr %272, align 64
  %274 = fadd <16 x float> %267, %273
  call void @store(ptr noundef %262, <16 x float> noundef %274)
  br label %275

275:
  %276 = load i32, ptr %29, align 4
  %277 = add nsw i32 %276, 1
  store i32 %277, ptr %29, align 4
  br label %240, !llvm.loop !89

278:
  ret void
}

define internal <16 x i32> @add_dot(<16 x i32> noundef %0, <64 x i8> noundef %1, i32 noundef %2) #11 {
  %4 = alloca <16 x i32>, align 64
  %5 = alloca <64 x i8>, align 64
  %6 = alloca i32, align 4
  %7 = alloca <16 x i32>, align 64
  store <16 x i32> %0, ptr %4, align 64
  store <64 x i8> %1, ptr %5, align 64
  store i32 %2, ptr %6, align 4
  %8 = load i32, ptr %6, align 4
  %9 = insertelement <16 x i32> poison, i32 %8, i64 0
  %10 = shufflevector <16 x i32> %9, <16 x i32> poison, <16 x i32> zeroinitializer
  store <16 x i32> %10, ptr %7, align 64
  %11 = load <16 x i32>, ptr %4, align 64
  %12 = load <64 x i8>, ptr %5, align 64
  %13 = load <16 x i32>, ptr %7, align 64
  %14 = bitcast <16 x i32> %13 to <64 x i8>
  %15 = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> %11, <64 x i8> %12, <64 x i8> %14)
  ret <16 x i32> %15
}

define internal <16 x float> @group_values(ptr noundef %0, ptr noundef %1, ptr noundef %2, i64 noundef %3, i64 noundef %4, i64 noundef %5) #11 {
  %7 = alloca <16 x float>, align 64
  %8 = alloca ptr, align 8
  %9 = alloca ptr, align 8
  %10 = alloca ptr, align 8
  %11 = alloca i64, align 8
  %12 = alloca i64, align 8
  %13 = alloca i64, align 8
  %14 = alloca i64, align 8
  %15 = alloca i32, align 4
  %16 = alloca i64, align 8
  store ptr %0, ptr %8, align 8
  store ptr %1, ptr %9, align 8
  store ptr %2, ptr %10, align 8
  store i64 %3, ptr %11, align 8
  store i64 %4, ptr %12, align 8
  store i64 %5, ptr %13, align 8
  %17 = load i64, ptr %11, align 8
  %18 = load ptr, ptr %8, align 8
  %19 = getelementptr inbounds nuw %struct.Blocks, ptr %18, i32 0, i32 12
  %20 = load i64, ptr %19, align 8
  %21 = load i64, ptr @group, align 8
  %22 = sdiv i64 %20, %21
  %23 = mul nsw i64 %17, %22
  %24 = load i64, ptr %13, align 8
  %25 = load i64, ptr @group, align 8
  %26 = sdiv i64 %24, %25
  %27 = add nsw i64 %23, %26
  %28 = mul nsw i64 %27, 16
  %29 = load i64, ptr %12, align 8
  %30 = add nsw i64 %28, %29
  store i64 %30, ptr %14, align 8
  %31 = load i64, ptr @outer, align 8
  %32 = icmp ne i64 %31, 0
  br i1 %32, label %38, label %33

33:
  %34 = load ptr, ptr %9, align 8
  %35 = load i64, ptr %14, align 8
  %36 = call ptr @element(ptr noundef %34, i64 noundef %35, i32 noundef 2)
  %37 = call <16 x float> @load(ptr noundef %36, i32 noundef 2)
  store <16 x float> %37, ptr %7, align 64
  store i32 1, ptr %15, align 4
  br label %62

38:
  %39 = load i64, ptr %11, align 8
  %40 = load ptr, ptr %8, align 8
  %41 = getelementptr inbounds nuw %struct.Blocks, ptr %40, i32 0, i32 12
  %42 = load i64, ptr %41, align 8
  %43 = load i64, ptr @outer, align 8
  %44 = sdiv i64 %42, %43
  %45 = mul nsw i64 %39, %44
  %46 = load i64, ptr %13, align 8
  %47 = load i64, ptr @outer, align 8
  %48 = sdiv i64 %46, %47
  %49 = add nsw i64 %45, %48
  %50 = mul nsw i64 %49, 16
  %51 = load i64, ptr %12, align 8
  %52 = add nsw i64 %50, %51
  store i64 %52, ptr %16, align 8
  %53 = load ptr, ptr %9, align 8
  %54 = load i64, ptr %14, align 8
  %55 = call ptr @element(ptr noundef %53, i64 noundef %54, i32 noundef 3)
  %56 = call <16 x float> @load(ptr noundef %55, i32 noundef 3)
  %57 = load ptr, ptr %10, align 8
  %58 = load i64, ptr %16, align 8
  %59 = call ptr @element(ptr noundef %57, i64 noundef %58, i32 noundef 2)
  %60 = call <16 x float> @load(ptr noundef %59, i32 noundef 2)
  %61 = fmul <16 x float> %56, %60
  store <16 x float> %61, ptr %7, align 64
  store i32 1, ptr %15, align 4
  br label %62

62:
  %63 = load <16 x float>, ptr %7, align 64
  ret <16 x float> %63
}

declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>) #15

attributes #0 = { nounwind }
attributes #1 = { alwaysinline nounwind }
attributes #2 = { nounwind }
attributes #3 = { noinline nounwind }
attributes #4 = { nounwind }
attributes #5 = { noinline nounwind }
attributes #6 = { nounwind }
attributes #7 = { nounwind }
attributes #8 = { nounwind }
attributes #9 = { nounwind }
attributes #10 = { nounwind }
attributes #11 = { alwaysinline nounwind }
attributes #12 = { nounwind }
attributes #13 = { nounwind }
attributes #14 = { nounwind }
attributes #15 = { nounwind }
attributes #16 = { nounwind }
attributes #17 = { nounwind }

!llvm.module.flags = !{!0, !1, !2, !3, !4}

!0 = !{i32 7, !"Dwarf Version", i32 4}
!1 = !{i32 1, !"wchar_size", i32 4}
!2 = !{i32 8, !"PIC Level", i32 2}
!3 = !{i32 7, !"uwtable", i32 2}
!4 = !{i32 7, !"frame-pointer", i32 2}
!5 = !{!"clang version 22.1.8"}
!6 = distinct !{!6, !7}
!7 = !{!"llvm.loop.mustprogress"}
!8 = distinct !{!8, !7}
!9 = distinct !{!9, !7}
!10 = distinct !{!10, !7}
!11 = distinct !{!11, !7}
!12 = distinct !{!12, !7}
!13 = distinct !{!13, !7}
!14 = distinct !{!14, !7}
!15 = distinct !{!15, !7}
!16 = distinct !{!16, !7}
!17 = distinct !{!17, !7}
!18 = distinct !{!18, !7}
!19 = distinct !{!19, !7}
!20 = distinct !{!20, !7}
!21 = distinct !{!21, !7}
!22 = distinct !{!22, !7}
!23 = distinct !{!23, !7, !24}
!24 = !{!"llvm.loop.unroll.full"}
!25 = distinct !{!25, !7, !24}
!26 = distinct !{!26, !7, !24}
!27 = distinct !{!27, !7, !24}
!28 = distinct !{!28, !7}
!29 = distinct !{!29, !7}
!30 = distinct !{!30, !7, !24}
!31 = distinct !{!31, !7, !24}
!32 = distinct !{!32, !7, !24}
!33 = distinct !{!33, !7}
!34 = distinct !{!34, !7}
!35 = distinct !{!35, !7, !24}
!36 = distinct !{!36, !7}
!37 = distinct !{!37, !7, !24}
!38 = distinct !{!38, !7, !24}
!39 = distinct !{!39, !7, !24}
!40 = distinct !{!40, !7}
!41 = distinct !{!41, !7}
!42 = distinct !{!42, !7}
!43 = distinct !{!43, !7}
!44 = distinct !{!44, !7}
!45 = distinct !{!45, !7}
!46 = distinct !{!46, !7}
!47 = distinct !{!47, !7}
!48 = distinct !{!48, !7}
!49 = distinct !{!49, !7}
!50 = distinct !{!50, !7}
!51 = distinct !{!51, !7}
!52 = distinct !{!52, !7}
!53 = distinct !{!53, !7}
!54 = distinct !{!54, !7}
!55 = distinct !{!55, !7}
!56 = distinct !{!56, !7, !24}
!57 = distinct !{!57, !7}
!58 = distinct !{!58, !7}
!59 = distinct !{!59, !7}
!60 = distinct !{!60, !7}
!61 = distinct !{!61, !7, !24}
!62 = distinct !{!62, !7, !24}
!63 = distinct !{!63, !7, !24}
!64 = distinct !{!64, !7}
!65 = distinct !{!65, !7, !24}
!66 = distinct !{!66, !7}
!67 = distinct !{!67, !7}
!68 = distinct !{!68, !7, !24}
!69 = distinct !{!69, !7, !24}
!70 = distinct !{!70, !7}
!71 = distinct !{!71, !7}
!72 = distinct !{!72, !7}
!73 = distinct !{!73, !7}
!74 = distinct !{!74, !7}
!75 = distinct !{!75, !7, !24}
!76 = distinct !{!76, !7, !24}
!77 = distinct !{!77, !7, !24}
!78 = distinct !{!78, !7, !24}
!79 = distinct !{!79, !7, !24}
!80 = distinct !{!80, !7, !24}
!81 = distinct !{!81, !7}
!82 = distinct !{!82, !7, !24}
!83 = distinct !{!83, !7, !24}
!84 = distinct !{!84, !7, !24}
!85 = distinct !{!85, !7, !24}
!86 = distinct !{!86, !7}
!87 = distinct !{!87, !7, !24}
!88 = distinct !{!88, !7}
!89 = distinct !{!89, !7, !24}
